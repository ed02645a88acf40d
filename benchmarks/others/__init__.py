"""Compare FedViT with other frameworks on the same work: python -m benchmarks.others (see `__main__`)."""
