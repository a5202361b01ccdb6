"""Small models of the native core's shared-memory protocols, explored exhaustively."""
