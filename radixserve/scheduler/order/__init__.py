"""Whose turn it is: the waiting prompts as a tree, how much of it is cached, and in which order its requests go."""
