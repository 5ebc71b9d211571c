"""The buffer's rollouts become a new adapter: the phase, and the maths it is made of."""
