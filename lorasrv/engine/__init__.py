"""The engine loop: prompts in, scheduler and worker once a step, text out."""
