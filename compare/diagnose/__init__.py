"""Name causes: rules as data over the evidence of a comparison."""
