"""Real processes on loopback: `make test-network`."""
