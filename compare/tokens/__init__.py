"""Per-token divergence of the two sides' log-probabilities: from dumps, and from files of log-probs."""
