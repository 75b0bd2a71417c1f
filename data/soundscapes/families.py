"""Recording families: which clips must stay together.

This is the first half of `prepare.py manifest`. A family is what one recording session gave: a voice, an
instrument, a creature, the numbered takes of one effect. Whole families go to train, validation or
evaluation (`splits.py`), so that no evaluation clip has a sibling in the training bank.
"""

import re
from collections.abc import Sequence

Clip = dict[str, str]

_ACTIONS = (
    r"(?:select|selected|ack|acknowledge|attack|atk|die|death|dead|dying|hit|hurt|pain|miss|fail|strike|harvest"
    r"|mine|move|stop|start|work|repair|build|idle|shoot|fire|loop|end|begin|critical|alert|release)"
)
_VARIANTS = frozenset(
    (
        *(
            "a",
            "b",
            "c",
            "d",
            "e",
            "l",
            "r",
            "left",
            "right",
            "alt",
            "new",
            "old",
            "st",
            "on",
            "off",
            "up",
            "down",
        ),
        *(
            "big",
            "small",
            "medium",
            "large",
            "long",
            "short",
            "low",
            "high",
            "lo",
            "hi",
            "mid",
            "med",
            "loud",
        ),
        *("soft", "softer", "softest", "hard", "harder", "hardest", "loop", "end", "start", "begin", "miss"),
    )
)
_ZERO_AD_GROUPS = (
    "amb",
    "day temperate",
    "river",
    "wind",
    "snowstorm",
    "male death",
    "female death",
    "sword",
    "arrow",
)
_DRUMS = (
    ("kick", r"kick|bassdrum|bass drum|\bbd\b|_bd|bd_|^bd|\bkd"),
    ("snare", r"snare|snr|\bsn\b|^sn\d|\bsd\b|sidestick|rim|stick|^cs"),
    ("hat", r"hat|\bhh|chh|ohh|phh"),
    ("tom", r"tom|floor|^tm\d|^ft_|^t[123]_"),
    ("ride", r"ride"),
    ("crash", r"cras|crsh|splash|china|paiste|cymbal|^cy|^cr\d|spla|^bl_"),
    ("clap", r"clap"),
    ("cowbell", r"cowbell|bell"),
    ("shaker", r"maraca|shaker|tamb|cabasa|guiro"),
    ("hand", r"conga|bongo|djembe|tabla|dun|udu"),
)


def family_of(clip: Clip) -> str:
    """The recording family of a clip, from its package and its path."""
    package, path = clip["package"], clip["path"].lower()
    member = path.split("!", 1)[1] if "!" in path else path
    rule = _RULES.get(package)
    return rule(member, clip) if rule is not None else f"{package}:{_folder(member)}/{stem_of(member)}"


def stem_of(path: str) -> str:
    """File name without suffix, digits and variant words: `fs_gravel4.ogg`, `fs-gravel-b.ogg`: `fs gravel`"""
    name = re.sub(r"\.(wav|ogg|flac|aiff|g722)$", "", path.rsplit("/", 1)[-1])
    name = re.sub(r"(?<=[0-9])[a-e]?(alt)?$", "", name)
    words = [word for word in re.split(r"[^a-z\u0400-\u04ff]+", name) if word]
    kept = [word for word in words if word not in _VARIANTS] or words
    return " ".join(kept) or name


def link_families(clips: Sequence[Clip], families: Sequence[str]) -> list[str]:
    """Merge families that share a recording.

    Two clips are taken to be one recording when their files are identical, when their names and lengths (to
    the millisecond) agree, or when two clips of a package, both 5 s or longer, have one length (filtered
    copies of a take).
    """
    parent = {family: family for family in families}

    def root(family: str) -> str:
        while parent[family] != family:
            family = parent[family]
        return family

    groups: dict[tuple[str, ...], str] = {}
    for clip, family in zip(clips, families, strict=True):
        seconds = float(clip["seconds"])
        stem = stem_of(clip["path"].lower())
        keys: list[tuple[str, ...]] = []
        if clip["sha256"]:
            keys.append(("file", clip["sha256"]))
        if clip["rough_class"] != "speech" and seconds >= 1 and round(seconds) != seconds:
            keys.append(("name", stem, clip["seconds"]))
            if seconds >= 5:
                keys.append(("length", clip["package"], clip["seconds"]))
        for key in keys:
            first, second = sorted((root(groups.setdefault(key, family)), root(family)))
            parent[second] = first
    return [root(family) for family in families]


def _folder(member: str) -> str:
    return member.rsplit("/", 2)[-2] if "/" in member else ""


def _without_action(stem: str) -> str:
    shorter = re.sub(rf"[ _-]?{_ACTIONS}(?: .*)?$", "", stem)
    return shorter or stem


def _drum(stem: str) -> str:
    return next((name for name, pattern in _DRUMS if re.search(pattern, stem)), "")


def _allison(member: str, clip: Clip) -> str:
    return "asterisk:allison"  # one speaker reads both the English and the Spanish prompts


def _one_family(member: str, clip: Clip) -> str:
    return f"{clip['package']}:all"


def _zero_ad(member: str, clip: Clip) -> str:
    if "/voice/" in member:
        civilisation = member.split("/voice/")[1].split("/")[0]
        return f"0ad-data:voice/{civilisation}/{'female' if 'female' in member else 'male'}"
    stem = stem_of(member)
    for family in _ZERO_AD_GROUPS:
        if stem.startswith(family):
            return f"0ad-data:{family}"
    return f"0ad-data:{_folder(member)}/{_without_action(stem)}"


def _megaglest(member: str, clip: Clip) -> str:
    return f"megaglest-data:{_without_action(stem_of(member))}"


def _wesnoth(member: str, clip: Clip) -> str:
    return f"wesnoth-1.16-data:{_without_action(stem_of(member))}"


def _freedoom(member: str, clip: Clip) -> str:
    stem = re.sub(r"^ds", "", stem_of(member))
    endings = r"(act|sit|dth|pain|pai|atk|wlk|sht|att|hit|die|dead|up|dn|idl|ful|opn|cls|cub|pit|pn)$"
    return f"freedoom:{re.sub(endings, '', stem) or stem}"


def _openclonk(member: str, clip: Clip) -> str:
    folders = member.split("/")[:-1]
    if len(folders) >= 2:
        return f"openclonk-data:{'/'.join(folders)}"
    return f"openclonk-data:{'/'.join(folders)}/{_without_action(stem_of(member))}"


def _ufoai(member: str, clip: Clip) -> str:
    if "/soldiers/" in member:
        return f"ufoai-sound:soldiers/{'female' if 'female' in member else 'male'}"
    if "/aliens/" in member:
        return f"ufoai-sound:aliens/{member.split('/aliens/')[1].split('/')[0]}"
    if "/footsteps/" in member:
        return f"ufoai-sound:footsteps/{stem_of(member)}"
    return f"ufoai-sound:{_folder(member)}/{stem_of(member)}"


def _redeclipse(member: str, clip: Clip) -> str:
    if "/announcer/" in member or clip["rough_class"] == "speech":
        return "redeclipse-data:announcer"
    if "/weapons/" in member:
        folder = member.split("/weapons/")[1].split("/")[0]
        return f"redeclipse-data:weapons/{stem_of(folder) if '.' in folder else folder}"
    return f"redeclipse-data:{_folder(member)}/{stem_of(member)}"


def _stamps(member: str, clip: Clip) -> str:
    if clip["rough_class"] != "speech":
        return f"tuxpaint-stamps-default:{stem_of(member)}"
    language = re.search(r"_desc_([a-z]{2,3}(?:_[a-z]{2})?)\.", member)
    return f"tuxpaint-stamps-default:voice/{language.group(1) if language else 'en'}"


def _qabcs(member: str, clip: Clip) -> str:
    if clip["rough_class"] == "speech":
        return f"qabcs-data:voice/{member.split('/abcs/')[1].split('/')[0]}"
    return f"qabcs-data:{stem_of(member)}"


def _soundfont(member: str, clip: Clip) -> str:
    name = re.sub(r"^shdr\[\d+\] *", "", member)
    if clip["package"] == "avldrums.lv2-soundfont":
        return f"blackpearl:{_drum(name) or stem_of(name)}"
    name = re.sub(r"\((l|r)?\)?$", "", name).strip()
    name = re.sub(r"[ _]?[a-g][#b]? ?(?:-?\d+|o) *[lr]?$", "", name)  # the note: `C#4`, `f 6l`
    drum = _drum(name) if clip["rough_class"] == "percussion" else ""
    return f"fluid-soundfont-gm:{drum or stem_of(name)}"


def _drumkit(member: str, clip: Clip) -> str:
    kit, name = member.split("/")[-2:]
    if "black pearl" in kit:  # the same drums as the soundfont of avldrums
        return f"blackpearl:{_drum(name) or stem_of(name)}"
    kit = re.sub(r"[\d. ]+$", "", kit).removesuffix(" v")
    if kit == "audiophob":
        return f"hydrogen:{kit}/{name.rsplit('.', 1)[0]}"
    return f"hydrogen:{kit}/{_drum(name) or stem_of(name)}"


def _plain_stem(member: str, clip: Clip) -> str:
    return f"{clip['package']}:{stem_of(member)}"


_RULES = {
    "0ad-data": _zero_ad,
    "asterisk-core-sounds-en-g722": _allison,
    "asterisk-core-sounds-es-g722": _allison,
    "asterisk-core-sounds-fr-g722": _one_family,
    "asterisk-core-sounds-ru-g722": _one_family,
    "avldrums.lv2-soundfont": _soundfont,
    "bucklespring-data": _one_family,
    "festvox-ru": _one_family,
    "fluid-soundfont-gm": _soundfont,
    "freedoom": _freedoom,
    "hydrogen-drumkits": _drumkit,
    "hydrogen-drumkits-effects": _one_family,
    "megaglest-data": _megaglest,
    "openclonk-data": _openclonk,
    "qabcs-data": _qabcs,
    "redeclipse-data": _redeclipse,
    "scorched3d-data": _plain_stem,
    "lincity-ng-data": _plain_stem,
    "tuxpaint-stamps-default": _stamps,
    "ufoai-sound": _ufoai,
    "wesnoth-1.16-data": _wesnoth,
}
