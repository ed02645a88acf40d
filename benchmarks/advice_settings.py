"""The protocol of the benchmark `advice`: what the rules of `fedvit advise` were written with, and what judges them.

Development: everything in results/small/*.json, which is seed 0 (and 1, 2) on the partitions of
experiments/small/*.toml, further rows on the same settings, the embedded digits with 24 or 12
clients, Dirichlet 0.2, 0.3 and 1, 16 and 40 rounds, and seeds 0 and 1, and every try below that has been judged. The
rules may be fitted to these.

Held out: HELD_OUT below, with other seeds, other partitions, other numbers of clients and rounds. Nobody looks at a
test score of these before the rules are committed. If the rules miss on them, that try stays on record, and the next
one needs new held-out settings.
"""

from fedvit.config.tables import Tables, stack_tables

TINY: Tables = {
    "model": {
        "name": "vit_tiny_patch16_224", "image_size": 64, "weights": "vit_tiny_patch16_224.fp16.safetensors",
    },
    "train": {"cohort": 4, "rounds": 7, "epochs": 2, "batch": 32, "optimizer": "sgd", "momentum": 0.9},
    "run": {"eval_every": 0, "threads": 1},
}  # fmt: skip
DIGITS: Tables = {
    "data": {"name": "digits", "test": 0.5},
    "model": {"name": "vit_micro"},
    "train": {"cohort": 6, "rounds": 16, "epochs": 2, "batch": 32, "optimizer": "adamw"},
    "run": {"eval_every": 0, "threads": 1},
}

SMALLER = stack_tables([TINY, {"model": {"image_size": 48}}])

# Large shares for testing keep the training short and the comparison sharp.
#
# The first try was judged on three settings, and its rules missed on one: from random weights, with Dirichlet 0.5, the
# advice was 6.7 points below the best row. In 16 rounds on half of the digits, the order of rows is that of chance: it
# changes with the seed by as much. Its other settings had not been looked at, so they went on to later tries, and the
# digits train for longer and on more images.
#
# The second try missed on three of four settings. On CIFAR-100 and Office-Caltech (2.4 and 3.9 points below the best
# row) the advice was fedavg_ft+bias and the best row fedavg_ft: in so few steps, biases alone had not learned enough.
# The rules now prefer full tuning below 50 steps. On PneumoniaMNIST (2.7 points) the best row had been 13 points below
# the same advice in the first try: with few and small clients, one seed measures luck. That rule stayed, and the third
# try takes the mean of several seeds there. It also takes the settings of the first try that nobody had looked at.
#
# The third try missed on one of four settings: on CIFAR-100 with ten classes of its own for every client, 5.5 points
# below fedper. The rules now prefer a personal head where clients share hardly any class. All other rules stayed, and
# the fourth try judges this one on two new partitions of CIFAR-100.
#
# The fourth try held on the one that this rule is for, and missed by 2.5 points on the other: at 47 steps, bias tuning
# was the better one this time. The rules now prefer full tuning below 40 steps instead of 50. All other rules stayed,
# and the fifth try judges CIFAR-100 where clients train long enough for rows to differ by more than chance.
#
# The fifth try held. Its settings, and most before, had one seed and 250 to 2,500 test images, too few to tell rows
# apart that are 2 points from each other. The sixth try judges all four datasets at once: on each one partition that
# was not used before, seeds that were not used before (three; digits, which has the fewest images, four), all rows in
# full on every seed, advice asked anew for every seed, and 5,700 to 7,200 test images over the seeds (digits: 3,600),
# so that the standard error of a mean from its test images is about 0.7 points or less. Every client takes part in
# every round, so that no row wins by the draw of its last cohorts. Images have 48 px and runs 5 or 6 rounds, so that
# all of it takes an hour on one core. Three things changed since the fifth try: gradients are clipped by default on
# pre-trained weights, the favourite in few steps is fed_rod+bias, and the probe uses more of the fifth it may cost.
# Used before, and therefore not here: seeds
# 0, 1, 2, 11, 12, 21, 31, 32, 41 and 51; Dirichlet 0.1, 0.2, 0.25 and 0.3 and classes of their own 8 and 10 on
# CIFAR-100, Dirichlet 0.2, 0.3, 0.4 and 0.5 on PneumoniaMNIST, Dirichlet 0.2, 0.3, 0.4, 0.5 and 1 and classes 3 and 5
# on digits, sites, and domains with Dirichlet 1 or 0.5 on Office-Caltech.
#
# The sixth try held on digits and PneumoniaMNIST, and missed on Office-Caltech by 3.4 points: in few steps the advice
# was fed_rod+bias with every seed, and the best row fedavg_ft, which had been ahead in two of the three probes by less
# than the favourite's head start. In the six few-step settings measured by now, the two are level. So in few steps they
# are the two candidates beside training alone, neither has a head start, and the probe, with one candidate fewer, goes
# further. All other rules stayed: what the sixth try says about digits, PneumoniaMNIST and CIFAR-100 (47 steps, which
# is not few) holds for them, and CIFAR-100 had not been looked at when the rule was changed. The seventh try judges the
# changed rule, on Office-Caltech, with new seeds and another partition.
#
# Before the seventh try ran, the default limit of gradients under full tuning rose from 10 to 100. So CIFAR-100 of the
# sixth try, which had held, ran again with it ("again"); its other settings did not.
HELD_OUT: dict[str, dict[str, Tables]] = {
    "first": {
        "pneumonia, dirichlet 0.2": stack_tables([TINY, {
            "data": {"name": "pneumoniamnist", "samples": 2000, "test": 0.7},
            "partition": {"name": "dirichlet", "clients": 10, "alpha": 0.2},
            "train": {"rounds": 6}, "run": {"seed": 11},
        }]),
        "digits, dirichlet 0.5": stack_tables([DIGITS, {
            "partition": {"name": "dirichlet", "clients": 12, "alpha": 0.5}, "run": {"seed": 11},
        }]),
        "digits, pathological 3": stack_tables([DIGITS, {
            "partition": {"name": "pathological", "clients": 12, "classes": 3}, "run": {"seed": 12},
        }]),
    },
    "second": {
        "digits, dirichlet 0.4": stack_tables([DIGITS, {
            "data": {"test": 0.25}, "partition": {"name": "dirichlet", "clients": 10, "alpha": 0.4},
            "train": {"cohort": 5, "rounds": 30}, "run": {"seed": 21},
        }]),
        "pneumonia, dirichlet 0.4": stack_tables([TINY, {
            "data": {"name": "pneumoniamnist", "samples": 2000, "test": 0.7},
            "partition": {"name": "dirichlet", "clients": 8, "alpha": 0.4},
            "train": {"rounds": 6}, "run": {"seed": 21},
        }]),
        "cifar100, dirichlet 0.3": stack_tables([TINY, {
            "data": {"name": "cifar100_small", "samples": 3600, "test": 0.7},
            "partition": {"name": "dirichlet", "clients": 10, "alpha": 0.3}, "run": {"seed": 11},
        }]),
        "office-caltech, sites": stack_tables([TINY, {
            "data": {"name": "office_caltech10", "test": 0.8},
            "partition": {"name": "site", "clients": 4}, "train": {"rounds": 4}, "run": {"seed": 12},
        }]),
    },
    "third": {
        "digits, pathological 5": stack_tables([DIGITS, {
            "data": {"test": 0.25}, "partition": {"name": "pathological", "clients": 10, "classes": 5},
            "train": {"cohort": 5, "rounds": 24}, "run": {"seed": 31},
        }]),
        "pneumonia, dirichlet 0.3": stack_tables([TINY, {
            "data": {"name": "pneumoniamnist", "samples": 2000, "test": 0.7},
            "partition": {"name": "dirichlet", "clients": 8, "alpha": 0.3},
            "train": {"rounds": 8}, "run": {"seed": 31},
        }]),
        "office-caltech, domains": stack_tables([TINY, {
            "data": {"name": "office_caltech10", "test": 0.7},
            "partition": {"name": "domain", "clients": 8, "alpha": 0.5}, "train": {"rounds": 6}, "run": {"seed": 11},
        }]),
        "cifar100, pathological 10": stack_tables([TINY, {
            "data": {"name": "cifar100_small", "samples": 1000},
            "partition": {"name": "pathological", "clients": 10, "classes": 10}, "run": {"seed": 12},
        }]),
    },
    "fourth": {
        "cifar100, pathological 8": stack_tables([TINY, {
            "data": {"name": "cifar100_small", "samples": 1000},
            "partition": {"name": "pathological", "clients": 10, "classes": 8}, "run": {"seed": 41},
        }]),
        "cifar100, dirichlet 0.2": stack_tables([TINY, {
            "data": {"name": "cifar100_small", "samples": 3600, "test": 0.7},
            "partition": {"name": "dirichlet", "clients": 10, "alpha": 0.2}, "run": {"seed": 41},
        }]),
    },
    "fifth": {
        "cifar100, dirichlet 0.25": stack_tables([TINY, {
            "data": {"name": "cifar100_small", "samples": 3600, "test": 0.6},
            "partition": {"name": "dirichlet", "clients": 10, "alpha": 0.25},
            "train": {"rounds": 12}, "run": {"seed": 51},
        }]),
    },
    "sixth": {
        "digits, dirichlet 0.6": stack_tables([DIGITS, {
            "partition": {"name": "dirichlet", "clients": 10, "alpha": 0.6},
            "train": {"cohort": 10, "rounds": 24}, "run": {"seed": 61},
        }]),
        "pneumonia, dirichlet 0.6": stack_tables([SMALLER, {
            "data": {"name": "pneumoniamnist", "samples": 3000, "test": 0.8},
            "partition": {"name": "dirichlet", "clients": 6, "alpha": 0.6},
            "train": {"cohort": 6, "rounds": 5}, "run": {"seed": 61},
        }]),
        "office-caltech, domains of two": stack_tables([SMALLER, {
            "data": {"name": "office_caltech10", "test": 0.75},
            "partition": {"name": "domain", "clients": 8, "alpha": 2.0},
            "train": {"cohort": 8, "rounds": 5}, "run": {"seed": 61},
        }]),
        "cifar100, dirichlet 0.15": stack_tables([SMALLER, {
            "data": {"name": "cifar100_small", "samples": 3000, "test": 0.75},
            "partition": {"name": "dirichlet", "clients": 6, "alpha": 0.15},
            "train": {"cohort": 6, "rounds": 6}, "run": {"seed": 61},
        }]),
    },
    "seventh": {
        "office-caltech, domains of three": stack_tables([SMALLER, {
            "data": {"name": "office_caltech10", "test": 0.7},
            "partition": {"name": "domain", "clients": 12, "alpha": 3.0},
            "train": {"cohort": 12, "rounds": 6}, "run": {"seed": 71},
        }]),
    },
}  # fmt: skip

# What judges the present rules: for each dataset the last try whose rules for it are the present ones. advice.json has
# all tries, whether they hold or miss.
HELD_OUT["again"] = {"cifar100, dirichlet 0.15": HELD_OUT["sixth"]["cifar100, dirichlet 0.15"]}
PRESENT = {
    "sixth": ("digits, dirichlet 0.6", "pneumonia, dirichlet 0.6"),
    "seventh": tuple(HELD_OUT["seventh"]),
    "again": tuple(HELD_OUT["again"]),
}
SEEDS = {  # settings that are judged by the mean over several seeds
    "pneumonia, dirichlet 0.3": (31, 32),
    **dict.fromkeys(HELD_OUT["sixth"], (61, 62, 63)),
    "digits, dirichlet 0.6": (61, 62, 63, 64),
    "office-caltech, domains of three": (71, 72, 73),
}

# The eight rows. On pre-trained weights their rates are those of results/small/rates.json, by tune; from random
# weights, they are the default ones.
PRETRAINED = ("local", "fedavg", "fedavg_ft", "fedper", "fedavg+bias", "fedavg_ft+bias", "fedper+bias", "fed_rod+bias")
SCRATCH = ("local", "fedavg", "fedavg_ft", "fedper", "fedrep", "fed_rod", "fedperfix", "ditto")
RATES = {"full": 5e-3, "bias": 1e-2, "local": 1e-3}
MEDICAL_RATES = {"full": 1e-3, "bias": 5e-3, "local": 1e-3}


def rows_of(setting: Tables) -> dict[str, Tables]:
    """Return the eight rows of a setting, by label: each is what differs from the setting."""
    if "weights" not in setting["model"]:
        return {name: {"method": {"name": name}} for name in SCRATCH}
    rates = MEDICAL_RATES if setting["data"]["name"] == "pneumoniamnist" else RATES
    rows = {}
    for label in PRETRAINED:
        method, _, tune = label.partition("+")
        rate = rates["local" if method == "local" else tune or "full"]
        rows[label] = {"method": {"name": method}, "tune": {"name": tune or "full"}, "train": {"lr": rate}}
    return rows
