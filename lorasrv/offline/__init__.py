"""Tools that never serve: capacity planner, verification against PEFT, quantization."""
