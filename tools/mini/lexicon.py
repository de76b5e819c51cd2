"""The words that the embedded benchmark's texts are made of, written for this project.

A domain is a field of life with its own nouns, verbs and qualities. Some words stand in several domains on purpose
("court", "match", "star"): a reader has to weigh the whole text, not to look for one word.
"""

from __future__ import annotations


def _words(text: str) -> list[str]:
    return text.split()


# domain -> (nouns, past-tense verbs, qualities)
DOMAINS: dict[str, tuple[list[str], list[str], list[str]]] = {
    "football": (
        _words(
            "striker goalkeeper penalty pitch league coach stadium referee defender derby kickoff midfielder transfer scarf "
            "match athlete sport"
        ),
        _words("scored tackled dribbled equalised defended substituted"),
        _words("unbeaten offside injured home away late"),
    ),
    "tennis": (
        _words(
            "racket serve court volley umpire backhand rally set doubles net seed baseline tournament match trophy athlete sport"
        ),
        _words("served volleyed sliced won lobbed retired"),
        _words("clay grass fast unseeded tired patient"),
    ),
    "running": (
        _words(
            "marathon sprinter track relay hurdle lap runner medal stopwatch lane pace trainer finish record shoe athlete sport"
        ),
        _words("sprinted jogged overtook trained stretched paced"),
        _words("breathless swift steady barefoot muddy steep"),
    ),
    "banking": (
        _words(
            "bank loan interest deposit branch credit mortgage account teller rate savings currency debt note vault money business"
        ),
        _words("lent borrowed repaid invested withdrew charged"),
        _words("solvent overdue fixed costly prudent monthly"),
    ),
    "trade": (
        _words(
            "export tariff cargo harbour merchant market invoice warehouse supplier contract shipment price customs order "
            "retailer company business money"
        ),
        _words("shipped sold imported bargained ordered delivered"),
        _words("cheap bulk foreign wholesale seasonal scarce"),
    ),
    "industry": (
        _words(
            "factory steel furnace engineer machine assembly plant worker turbine strike output foreman bolt crane company business"
        ),
        _words("assembled welded manufactured hired closed expanded"),
        _words("heavy automated idle skilled noisy modern"),
    ),
    "politics": (
        _words(
            "minister parliament vote election party senator ballot coalition cabinet campaign law speech voter reform seat world"
        ),
        _words("voted governed resigned debated elected legislated"),
        _words("liberal conservative popular corrupt federal divided"),
    ),
    "diplomacy": (
        _words(
            "treaty embassy border envoy summit alliance sanction refugee ceasefire delegation ambassador talks union "
            "accord visa world"
        ),
        _words("negotiated signed mediated recognised protested withdrew"),
        _words("neutral bilateral tense secret formal hostile"),
    ),
    "war": (
        _words("soldier army tank siege general trench missile troops battle fortress rebel convoy command victory truce world"),
        _words("invaded besieged retreated fired occupied surrendered"),
        _words("armed wounded brutal fierce fallen loyal"),
    ),
    "justice": (
        _words("court judge lawyer trial jury verdict witness prison crime sentence appeal evidence police theft fine law"),
        _words("accused sentenced testified appealed arrested acquitted"),
        _words("guilty innocent legal violent alleged strict"),
    ),
    "space": (
        _words(
            "rocket orbit telescope planet comet astronaut satellite galaxy moon star launch crater probe capsule gravity "
            "science vehicle"
        ),
        _words("orbited launched observed landed drifted docked"),
        _words("lunar distant dark solar cold weightless"),
    ),
    "medicine": (
        _words(
            "doctor patient fever vaccine surgeon clinic virus pill nurse dose symptom blood hospital cell wound health science"
        ),
        _words("treated vaccinated diagnosed prescribed healed infected"),
        _words("chronic mild contagious feverish painful healthy"),
    ),
    "computing": (
        _words("computer software keyboard server network password screen program file browser chip code robot disk user science"),
        _words("programmed installed crashed downloaded encrypted updated"),
        _words("digital wireless online slow open secure"),
    ),
    "physics": (
        _words(
            "atom laser particle magnet energy experiment laboratory theory wave field scale current heat vacuum professor science"
        ),
        _words("measured calculated collided cooled proved radiated"),
        _words("electric tiny quantum precise unstable invisible"),
    ),
    "music": (
        _words("guitar singer melody concert drum violin chorus album orchestra note stage tune pitch piano record artist leisure"),
        _words("sang strummed composed recorded conducted rehearsed"),
        _words("acoustic loud gentle rhythmic famous minor"),
    ),
    "film": (
        _words(
            "actor director scene camera screen script studio trailer audience star role comedy drama cinema ticket artist leisure"
        ),
        _words("filmed acted directed starred screened edited"),
        _words("dramatic silent funny animated black classic"),
    ),
    "books": (
        _words("novel author chapter library poem reader publisher story page essay hero volume script diary shelf artist leisure"),
        _words("wrote published narrated translated read described"),
        _words("fictional historical printed poetic short rare"),
    ),
    "school": (
        _words(
            "teacher pupil classroom exam lesson homework degree student campus scholarship lecture grade diploma library "
            "term school learning"
        ),
        _words("taught studied graduated enrolled explained passed"),
        _words("academic young clever difficult private final"),
    ),
    "family": (
        _words("mother father wedding sister brother child marriage cousin husband wife baby home birthday uncle quarrel family"),
        _words("married argued forgave adopted hugged divorced"),
        _words("loving jealous lonely elder close honest"),
    ),
    "cooking": (
        _words("kitchen recipe oven soup flour sauce chef butter onion dish spice bread supper knife table food"),
        _words("baked fried tasted chopped boiled stirred"),
        _words("salty fresh sweet crisp burnt tender"),
    ),
    "travel": (
        _words("hotel passport suitcase flight beach guide ticket tourist train journey map airport island luggage visa vehicle"),
        _words("travelled flew booked explored packed arrived"),
        _words("scenic crowded remote sunny foreign cheap"),
    ),
    "animals": (
        _words("wing beak fur nest predator herd paw feather tail insect bat claw species habitat burrow animal"),
        _words("hunted grazed migrated hatched nested crawled"),
        _words("wild nocturnal striped spotted endangered tame"),
    ),
    "plants": (
        _words("leaf root petal seed stem flower tree shrub forest bark fruit plant soil branch moss"),
        _words("bloomed sprouted withered grew pollinated climbed"),
        _words("green leafy thorny tropical fragrant tall"),
    ),
    "water": (
        _words("river bank valley bridge lake stream flood bed mouth boat delta waterfall dam current shore"),
        _words("flowed flooded carved crossed froze emptied"),
        _words("shallow wide muddy deep clear cold"),
    ),
    "building": (
        _words("tower wall roof architect tile brick arch hall column gate floor stair stone window court building"),
        _words("built restored designed demolished painted erected"),
        _words("gothic old wooden grand ruined tall"),
    ),
    "village": (
        _words("parish farm church hamlet mayor road well meadow inhabitant mill market square field barn fair village"),
        _words("farmed settled harvested ploughed gathered milked"),
        _words("rural quiet small hilly remote dusty"),
    ),
}

# five levels of judgement, from the worst to the best
JUDGEMENTS: list[list[str]] = [
    _words("terrible awful dreadful useless hateful rotten worthless disgusting broken"),
    _words("bad poor weak disappointing flimsy dull annoying faulty noisy bland"),
    _words("mixed ordinary average usable plain acceptable typical adequate slow simple"),
    _words("good solid pleasant handy reliable comfortable fine neat useful"),
    _words("excellent superb wonderful perfect brilliant amazing delightful flawless lovely"),
]
PRODUCTS = _words(
    "kettle lamp chair radio jacket phone blender tent clock backpack heater camera pillow bicycle speaker mug printer "
    "drill umbrella desk"
)
PARTS = _words("handle lid button battery zip cable case colour manual price motor strap box cover switch size")
DEGREES = _words("very quite rather really so somewhat truly")
PEOPLE_STARTS = _words("Al Be Cor Da El Fa Gre Ha Il Jo Ka Le Ma No Or Pe Qui Ro Sa Te Ul Va Wil Yo Ze")
PEOPLE_ENDS = _words("ra nen vin lo dra mir ton sa bel rik gan ley mon tar ny rus")
PLACE_STARTS = _words("Ash Bren Cal Dun Esk Fen Gal Hol Kes Lor Mar Nor Ost Pel Ran Sel Tor Ulm Ver Wes")
PLACE_ENDS = _words("ford wick mere dale stad burg hem field port moor by gate")
COLOURS = _words("red blue green yellow white brown grey orange purple pink")
NUMBERS = _words("two three four five six seven eight nine ten twelve")
MONTHS = _words("January March April May June July August October November December")
TIMES = _words("yesterday today recently again soon later finally often twice suddenly quietly slowly")
