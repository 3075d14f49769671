"""Seeds of the random numbers that a training step uses."""


def step_seed(seed: int, step: int, micro: int) -> int:
    """The seed of one micro-batch: a function of the run's seed, the step and the micro-batch, so no state is saved.

    SplitMix64's finalizer (Steele et al., 2014) over the three numbers.
    """
    mixed = 0
    for part in (seed, step, micro):
        mixed = (mixed ^ part) + 0x9E3779B97F4A7C15 & (1 << 64) - 1
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & (1 << 64) - 1
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & (1 << 64) - 1
        mixed ^= mixed >> 31
    return mixed >> 1
