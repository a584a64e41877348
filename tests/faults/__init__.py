"""The fault suite: known faults put into real models, and what a comparison says of each (``make faults``)."""
