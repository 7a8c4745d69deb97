"""Train, serve and measure Carryover Drafting (arXiv 2609.14717)."""

__version__ = "0.1.0"
