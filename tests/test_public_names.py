import anchorlora
import forked

CONTRACT = {"Subspace", "Anchor", "AdaptedLayer", "AdapterStack", "FeatureStore", "protect", "measure", "audit", "Trace"} | {
    "Method", "METHODS", "Shared", "PerTask", "Task", "run_sequence", "Scores", "ProtectionCallback"
}  # fmt: skip
CONSTRAINTS = {"Freeze", "ProjectDisplacement", "ProjectGradient", "ProjectStep", "Retract", "RoutingOverlap", "EffectiveResponse"}
CONSTRAINTS |= {"Distillation", "EffectiveSparsity", "FisherAnchor", "ProjectSingular"}
CONSTRAINTS |= {"AnswerSensitivity", "SensitiveCore", "KroneckerBrake", "GradientStart", "InputStart", "NullStart", "RankSplit"}
# so that every printed definition is Python after `from anchorlora import *`, and a constraint of one's own can be written
IN_DEFINITIONS = {"FoldedPerTask", "GatedPerTask", "MergedPerTask", "Rehearsal", "ActiveConstraint"}
NAMES = CONTRACT | CONSTRAINTS | IN_DEFINITIONS


def test_the_public_names_are_these_and_nothing_else():
    assert set(anchorlora.__all__) - {"__version__"} == NAMES
    assert len(NAMES) <= 40


def test_every_public_name_loads_and_says_what_it_is():
    for name in sorted(NAMES):
        value = getattr(anchorlora, name)
        assert name == "METHODS" or value.__doc__, name


def test_all_of_them_can_be_imported_without_the_extras(tmp_path):
    """Lightning is an extra; its callback is refused where it is made, not where it is named."""
    program = (
        "from anchorlora import *\n"
        "from anchorlora.integrations.lightning import LightningProtection\n"
        "try:\n"
        "    LightningProtection([Freeze('B')])\n"
        "except ImportError as error:\n"
        "    print(error)\n"
    )
    extras = ("lightning", "pytorch_lightning", "trl", "lm_eval", "bitsandbytes", "datasets", "axolotl", "llamafactory", "unsloth")
    assert forked.without(extras, program, said=tmp_path / "said") == "LightningProtection needs Lightning: pip install lightning\n"


def test_an_unknown_name_is_an_attribute_error():
    assert not hasattr(anchorlora, "Sfor")
