"""Dump format: schema, dtypes, writer, reader, validation of untrusted files."""
