"""Tools that are not used while serving: capacity planner, verification against PEFT, quantization."""
