"""How the EAGLE-3 head for SmolLM2-135M-Instruct is made: questions, the model's answers, training, measurement."""
