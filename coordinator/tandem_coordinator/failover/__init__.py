"""The drafter and the verifier of the round loop, on whichever replica is there."""
