"""Experiments on small language models whose rules are known: `rankone run toy_language`, `induction`."""
