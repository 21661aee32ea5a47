"""Run the engine loop: process inputs, schedule and compute a step, process outputs."""
