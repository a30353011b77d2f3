"""MT-Bench: two-turn questions of eight kinds, answered by a model and graded from 1 to 10 by a judge."""
