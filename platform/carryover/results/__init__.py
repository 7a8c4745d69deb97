"""The results page: what MLflow's runs say about whether Carryover pays."""
