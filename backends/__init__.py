"""Effects: the Dynamo entry point, communicators and lowering targets."""
