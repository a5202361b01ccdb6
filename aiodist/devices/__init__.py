"""Where arrays live, and how work on them is ordered."""
