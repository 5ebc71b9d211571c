"""A run's folder becomes a picture (``curves``) and one self-contained HTML page (``page``)."""
