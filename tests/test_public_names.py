import anchorlora

CONTRACT = {"Subspace", "Product", "Factors", "Site", "Scope", "RowStore", "protect", "measure", "Trace"} | {
    "Method", "METHODS", "Task", "Recipe", "run_sequence", "Scores"
}  # fmt: skip
CONSTRAINTS = {"Freeze", "ProjectDisplacement", "ProjectGradient", "ProjectStep", "Retract", "RoutingOverlap", "EffectiveResponse"}
CONSTRAINTS |= {"Distillation", "EffectiveSparsity", "FisherAnchor"}
TRAINERS = {"AuditCallback", "ProtectionCallback", "LightningProtection"}
AUDIT = {"Audit", "auditing", "FeatureCores", "WeightDirections", "EarlierRows", "realised_weights"}
OTHERS = AUDIT | {"Constraint", "Held", "Drift", "Spectrum", "Shared", "PerTask", "GatedPerTask", "Rehearsal"}
OTHERS |= {"Blocks", "cores_from_data", "read_cores", "write_cores"}


def test_the_public_names_are_these_and_nothing_else():
    assert set(anchorlora.__all__) - {"__version__"} == CONTRACT | CONSTRAINTS | TRAINERS | OTHERS


def test_every_public_name_loads_and_says_what_it_is():
    for name in sorted(CONTRACT | CONSTRAINTS | TRAINERS | OTHERS):
        value = getattr(anchorlora, name)
        assert name == "METHODS" or value.__doc__, name


def test_an_unknown_name_is_an_attribute_error():
    assert not hasattr(anchorlora, "Sfor")
