"""The split: which recording families train and which are scored.

This is the second half of `prepare.py manifest`. Six packages are kept out of training altogether; the
other families are dealt out class by class, in the order of a hash of their name.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Sequence

from families import Clip

HELD_OUT_PACKAGES = (
    "flare-game",
    "supertuxkart-data",
    "sonic-pi-samples",
    "tuxpaint-plugins-default",
    "wordwarvi-sound",
    "asterisk-core-sounds-fr-g722",
)
MIN_BANDWIDTH_HZ = 7000  # below it a clip tells sources apart by bandwidth alone: training only
UNSURE_CLASSES = ("ambience_background", "vehicles_mechanical", "synthetic_fx")  # too few clips are certain
LONG_SECONDS = 10.0  # long enough to be the background of a mixture
SPLIT_SHARES = {"evaluation": 0.12, "validation": 0.08}  # of the usable seconds of each class
MIN_FAMILIES = {"evaluation": 10, "validation": 6}
MIN_LONG_FAMILIES = {"evaluation": 12, "validation": 4}  # families that can give a background
BIG_FAMILY_SHARE = 0.12  # a family with more of its class than this is needed for training
SPEECH_CAP_SECONDS = {"tuxpaint-stamps-default": 3600.0, "festvox-ru": 2400.0}

# Found by `prepare.py audit`: these share a recording or a session with training.
SIBLINGS_OF_TRAINING = frozenset(
    {
        "0ad-data:footsteps/footstep grass running",
        "0ad-data:footsteps/footstep gravel running",
        "0ad-data:footsteps/footstep rock walking",
        "0ad-data:footsteps/footstep wood walking",
        "0ad-data:gathering/gather meatexpire",
        "0ad-data:impact/fleshimp",
        "0ad-data:impact/sling stone",
        "0ad-data:lumbering/lumber treeexpire",
        "0ad-data:siege/ballist",
        "0ad-data:singlesteps/fs grass",
        "0ad-data:singlesteps/fs gravel",
        "0ad-data:water/waterfall",
        "0ad-data:water/wavecrash",
        "fluid-soundfont-gm:pop",
        "freedoom:skl",
        "hydrogen:gimme a hand/clap",
        "lincity-ng-data:powerline",
        "lmms-common:drums/tom",
        "redeclipse-data:ambience/waterfall",
        "redeclipse-data:morph/machine",
        "supertuxkart-data:sfx/anvil",
        "wesnoth-1.16-data:chat fri",
        "wesnoth-1.16-data:chat highlight",
    }
)


def usable_for_evaluation(clip: Clip) -> bool:
    """Whether a clip may be scored: full bandwidth, and one source for certain except in `UNSURE_CLASSES`."""
    if int(clip["bandwidth_hz"]) < MIN_BANDWIDTH_HZ:
        return False
    return clip["isolated"] == "yes" or clip["rough_class"] in UNSURE_CLASSES


def held_out(package: str) -> str:
    """`yes` for a package that is kept out of training as a whole, else `no`."""
    return "yes" if package in HELD_OUT_PACKAGES else "no"


def assign_splits(clips: Sequence[Clip], families: Sequence[str]) -> list[str]:
    """The split of each clip: train, validation, evaluation, or unused (not fit for its family's split)."""
    members: dict[str, list[int]] = defaultdict(list)
    for index, family in enumerate(families):
        members[family].append(index)
    by_family: dict[str, str] = {}
    for family, indices in members.items():
        if any(clips[i]["package"] in HELD_OUT_PACKAGES for i in indices):
            by_family[family] = "evaluation"
    for rough_class in sorted({clip["rough_class"] for clip in clips}):
        candidates = [
            f
            for f, indices in members.items()
            if f not in by_family and _class(clips, indices) == rough_class
        ]
        by_family |= _split_class(clips, members, candidates)
    splits = [by_family[family] for family in families]
    for i, clip in enumerate(clips):
        sibling = families[i] in SIBLINGS_OF_TRAINING
        if splits[i] != "train" and (sibling or not usable_for_evaluation(clip)):
            splits[i] = "unused"
    for package, cap in SPEECH_CAP_SECONDS.items():
        _cap_speech(clips, families, splits, package, cap)
    return splits


def _split_class(
    clips: Sequence[Clip], members: dict[str, list[int]], candidates: Iterable[str]
) -> dict[str, str]:
    """Fill evaluation, then validation, with the families of one class in hash order; the rest trains."""
    usable = {f: [i for i in members[f] if usable_for_evaluation(clips[i])] for f in candidates}
    seconds = {f: sum(float(clips[i]["seconds"]) for i in indices) for f, indices in usable.items()}
    total = sum(seconds.values())
    is_long = {
        f: any(float(clips[i]["seconds"]) >= LONG_SECONDS for i in indices) for f, indices in usable.items()
    }
    is_ambience = any(
        clips[i]["rough_class"] == "ambience_background" for ids in usable.values() for i in ids
    )
    ordered = sorted((f for f in usable if seconds[f] > 0), key=_hash)
    if is_ambience:  # backgrounds first: they are what an evaluation set runs out of
        ordered.sort(key=lambda f: not is_long[f])
    result = dict.fromkeys(usable, "train")
    for split, share in SPLIT_SHARES.items():
        filled, count, long_families = 0.0, 0, 0
        for family in ordered:
            if result[family] != "train" or seconds[family] > BIG_FAMILY_SHARE * total:
                continue
            enough_long = not is_ambience or long_families >= MIN_LONG_FAMILIES[split]
            if filled >= share * total and count >= MIN_FAMILIES[split] and enough_long:
                break
            result[family] = split
            filled += seconds[family]
            count += 1
            long_families += is_long[family]
    return result


def _cap_speech(
    clips: Sequence[Clip], families: Sequence[str], splits: list[str], package: str, cap: float
) -> None:
    """Mark the surplus of a package's speech `unused`, taking the same number of seconds from every voice."""
    voices: dict[str, list[int]] = defaultdict(list)
    for i, clip in enumerate(clips):
        if clip["package"] == package and clip["rough_class"] == "speech" and splits[i] != "unused":
            voices[families[i]].append(i)
    lengths = sorted(sum(float(clips[i]["seconds"]) for i in indices) for indices in voices.values())
    left, allowance = cap, 0.0
    for position, length in enumerate(lengths):  # water filling: the short voices keep everything
        allowance = left / (len(lengths) - position)
        left -= min(length, allowance)
    for indices in voices.values():
        used = 0.0
        for i in sorted(indices, key=lambda i: _hash(clips[i]["path"])):
            used += float(clips[i]["seconds"])
            if used > allowance:
                splits[i] = "unused"


def _class(clips: Sequence[Clip], indices: Sequence[int]) -> str:
    seconds: dict[str, float] = defaultdict(float)
    for i in indices:
        seconds[clips[i]["rough_class"]] += float(clips[i]["seconds"])
    return max(sorted(seconds), key=lambda name: seconds[name])


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
