"""Why carrying helps, or does not: what carried rows tell a drafter."""
