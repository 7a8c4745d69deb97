"""Drafters: speculators' block drafters, extended with carried context."""
