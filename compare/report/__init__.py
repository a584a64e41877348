"""Forms of a report: plain data first, then one file per form."""
