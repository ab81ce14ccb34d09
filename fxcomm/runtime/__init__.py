"""Runtime: executes a plan; decides nothing."""
