"""Differential privacy: noised gradients, the secret behind the noise, and the account of what was spent."""
