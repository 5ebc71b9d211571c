"""The processes of a run that sample and learn together, on Ray."""
