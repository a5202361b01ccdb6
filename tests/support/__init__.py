"""What the tests share: the numpy oracle, the ways to run ranks, and the programs that ranks run."""
