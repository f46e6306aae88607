"""The oracle: a dense reference in plain torch, and a driver of random schedules that holds the engine against it."""
