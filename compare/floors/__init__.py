"""What difference rounding explains: modelled, measured on the same side twice, or against a higher precision."""
