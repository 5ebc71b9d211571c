"""The base copy that vLLM owns and the learner shares."""
