"""What a person sees and types. Nothing below imports it; commands begin in ``cli``."""
