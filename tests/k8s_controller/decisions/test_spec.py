"""What a TrainingJob's spec means, and what is refused."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from job_server.api.failure_policy import FailureRule, Then
from k8s_controller.decisions.objects import foundations, server_pod, trainer_pod
from k8s_controller.decisions.spec import SpecError, parse
from tests.k8s_controller.jobs import parsed, training_job


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        pytest.param({}, (1, 1, 1), id="nothing said: one pod"),
        pytest.param({"replicas": 4}, (4, 1, 4), id="a number alone is the most as well"),
        pytest.param({"maxReplicas": 5}, (5, 1, 5), id="as many as it may have"),
        pytest.param({"minReplicas": 2}, (2, 2, 2), id="the least alone is all"),
        pytest.param({"minReplicas": 2, "maxReplicas": 5, "replicas": 3}, (3, 2, 5), id="all"),
    ],
)
def test_numbers_of_pods_follow_from_those_that_are_given(fields: dict[str, Any], expected):
    spec = parsed(**fields)
    assert (spec.replicas, spec.min_replicas, spec.max_replicas) == expected


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"minReplicas": 3, "maxReplicas": 2}, "spec.maxReplicas"),
        ({"replicas": 6, "maxReplicas": 5}, "spec.replicas"),
        ({"replicas": "2"}, "spec.replicas"),
        ({"replicas": True}, "spec.replicas"),
        ({"minReplicas": 0}, "spec.minReplicas"),
        ({"maxReplicas": 501}, "spec.maxReplicas: must be between 1 and 500"),
        ({"overlap": "maybe"}, "spec.overlap"),
        ({"standby": 1, "overlap": "off"}, "standby"),
        ({"cleanPodPolicy": "Some"}, "spec.cleanPodPolicy"),
        ({"failurePolicy": [{"exit_code": [300], "then": "fail"}]}, "spec.failurePolicy: rule 1"),
        ({"server": {"storage": {}}}, "spec.server.storage.size"),
        ({"autoscale": True, "maxReplicas": 5, "replicas": 2}, "spec.replicas"),
        ({"autoscale": True}, "spec.maxReplicas"),
        ({"autoscale": True, "maxReplicas": 5}, "resources.requests"),
        ({"template": {"spec": {}}}, "spec.template.spec"),
        ({"template": {"spec": {"containers": []}}}, "spec.template.spec.containers"),
    ],
)
def test_what_cannot_be_right_is_refused_by_the_name_of_its_field(fields, field):
    with pytest.raises(SpecError, match=field):
        parsed(**fields)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"lifecycle": {}}, "lifecycle"),
        ({"image": ""}, "image"),
        ({"command": []}, "command"),
        ({"env": [{"name": "EDL_TOKEN", "value": "x"}]}, "EDL_TOKEN"),
        ({"env": [{"name": "POD_UID", "value": "x"}]}, "POD_UID"),
        ({"resources": {"limits": {"nvidia.com/gpu": "half"}}}, "nvidia.com/gpu"),
        (
            {"resources": {"limits": {"nvidia.com/mig-1g.5gb": 1}}},
            r"1g\.5gb: a trainer has a whole",
        ),
        ({"resources": {"requests": {"nvidia.com/gpu.shared": 1}}}, r"nvidia\.com/gpu\.shared: "),
        ({"resources": {"limits": {"amd.com/gpu": 1}}}, r"amd\.com/gpu: .* leave it out"),
        ({"resources": {"claims": [{"name": "gpu"}]}}, r"resources\.claims: .* claimed idle"),
    ],
)
def test_of_the_trainers_container_only_what_is_the_users_may_be_set(change, field):
    job = training_job()
    job["spec"]["template"]["spec"]["containers"][0].update(change)
    with pytest.raises(SpecError, match=field):
        parse(job)


def test_a_pod_with_gpus_may_claim_what_else_it_needs():
    job = training_job()
    resources = {"limits": {"nvidia.com/gpu": 2}, "claims": [{"name": "network-card"}]}
    job["spec"]["template"]["spec"]["containers"][0]["resources"] = resources
    assert parse(job).slots_per_pod == 2


def test_the_names_that_are_usual_for_a_pods_own_facts_are_the_users():
    job = training_job()
    container = job["spec"]["template"]["spec"]["containers"][0]
    container["env"] = [{"name": "POD_NAMESPACE", "value": "here"}]
    assert parse(job).replicas == parse(training_job()).replicas


def test_a_pod_has_a_trainer_for_each_of_its_gpus():
    job = training_job()
    container = job["spec"]["template"]["spec"]["containers"][0]
    container["resources"] = {"limits": {"nvidia.com/gpu": 4}}
    assert (parse(job).slots_per_pod, parse(job).has_gpus) == (4, True)
    job["spec"]["slotsPerPod"] = 2
    with pytest.raises(SpecError, match="slotsPerPod"):
        parse(job)


def test_the_rules_about_failures_are_those_of_the_job_server():
    spec = parsed(failurePolicy=[{"exit_code": [3, 4], "then": "fail"}])
    assert spec.job_spec("digits").failure_policy == (
        FailureRule(then=Then.FAIL, exit_code=(3, 4)),
    )


def test_a_name_that_leaves_no_room_for_those_of_pods_is_refused():
    with pytest.raises(SpecError, match=r"metadata\.name"):
        parse(training_job(name="x" * 51))


def full_template() -> dict[str, Any]:
    """Return one that has all that is read of a template."""
    container = {
        "name": "trainer", "image": "edl", "command": ["python"], "args": ["train.py"],
        "env": [{"name": "A", "value": "b"}], "volumeMounts": [{"name": "v", "mountPath": "/v"}],
        "resources": {"requests": {"cpu": "1"}, "limits": {"memory": "1Gi"}},
        "securityContext": {"readOnlyRootFilesystem": True},
    }  # fmt: skip
    return {
        "metadata": {"labels": {"a": "b"}, "annotations": {"c": "d"}},
        "spec": {
            "containers": [container],
            "initContainers": [container | {"name": "first"}],
            "volumes": [{"name": "v", "emptyDir": {}}],
            "securityContext": {"runAsUser": 5},
            "terminationGracePeriodSeconds": 60,
            "nodeSelector": {"a": "b"},
            "tolerations": [{"operator": "Exists"}],
        },
    }


def places(value: Any, *path: Any) -> Iterator[tuple[Any, ...]]:
    for key in value if isinstance(value, dict) else range(len(value)):
        yield (*path, key)
        if isinstance(value[key], (dict, list)):
            yield from places(value[key], *path, key)


@pytest.mark.parametrize("wrong", [None, "x", 7, True, [], {}, ["x"], [None], [{}], {"x": None}])
def test_whatever_stands_in_a_template_is_read_or_refused_by_name(wrong):
    # The API server cannot look into it, and one job's error must not be that of all.
    told = list[str]()
    for path in places(full_template()["spec"], "spec"):
        job = training_job()
        template = job["spec"]["template"] = copy.deepcopy(full_template())
        at: Any = template
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = wrong
        try:
            spec = parse(job)
        except SpecError as error:
            told.append(str(error))
            continue
        assert foundations(job, spec, "token")
        assert server_pod(job, spec)["spec"]
        assert trainer_pod(job, spec, 0)["spec"]
    assert all(text.startswith("spec.template.spec.") for text in told), told


@pytest.mark.parametrize("field", ["env", "args", "resources", "volumeMounts", "securityContext"])
def test_a_field_of_the_template_behind_which_nothing_stands_is_as_left_out(field):
    job, usual = training_job(), training_job()
    job["spec"]["template"]["spec"]["containers"][0][field] = None
    job["spec"]["template"]["spec"] |= {"volumes": None, "terminationGracePeriodSeconds": None}
    made = trainer_pod(job, parse(job), 0)
    assert made == trainer_pod(usual, parse(usual), 0)


def test_a_label_behind_which_nothing_stands_is_an_empty_one():
    job = training_job()
    terms = [{"labelSelector": {"matchLabels": {"app": None}}, "topologyKey": "zone"}]
    affinity = {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
    of_pod = {"nodeSelector": {"node-role.kubernetes.io/gpu": None}, "affinity": affinity}
    job["spec"]["template"]["spec"] |= of_pod
    job["spec"]["template"]["metadata"] = {"labels": {"team": None}}
    template = parse(job).template
    assert template["spec"]["nodeSelector"] == {"node-role.kubernetes.io/gpu": ""}
    found = template["spec"]["affinity"]["podAffinity"]
    [term] = found["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["labelSelector"]["matchLabels"] == {"app": ""}
    assert template["metadata"]["labels"] == {"team": ""}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"env": {"A": "b"}}, r"containers\[trainer\]\.env: expected a list"),
        ({"command": "python train.py"}, r"containers\[trainer\]\.command: expected a list"),
        ({"args": ["--epochs", 3]}, r"args: expected texts, got 3; write it in quotes"),
        ({"resources": {"limits": "1"}}, r"resources\.limits: expected a mapping"),
    ],
)
def test_what_is_another_thing_in_a_template_is_refused_with_the_remedy(change, told):
    job = training_job()
    job["spec"]["template"]["spec"]["containers"][0] |= change
    with pytest.raises(SpecError, match=told):
        parse(job)
