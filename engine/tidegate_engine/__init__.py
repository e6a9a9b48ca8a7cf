"""The data plane: a continuous-batching engine that obeys its pool's policy at every step."""
