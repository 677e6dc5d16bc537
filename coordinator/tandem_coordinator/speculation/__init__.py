"""How many tokens to propose: the cost model, the gain model, the controller that decides by them."""
