"""The type stubs: what they say of the operators is what torch has registered."""

from __future__ import annotations

import ast
from importlib import resources

import torch

import flashmla
from flashmla import operators

# How schemas spell what annotations say.
TYPES = {
    "torch.Tensor": "Tensor",
    "torch.Tensor | None": "Optional[Tensor]",
    "int": "int",
    "bool": "bool",
    "float | None": "Optional[float]",
}
RETURNS = {"None": [], "tuple[torch.Tensor, torch.Tensor]": ["Tensor", "Tensor"]}
NO_DEFAULT = object()


def stub_signatures() -> dict[str, tuple[list, list]]:
    """For each function of the stub: its arguments (name, type, default), and its results."""
    tree = ast.parse((resources.files("flashmla") / "operators.pyi").read_text())
    signatures = {}
    for function in tree.body:
        if not isinstance(function, ast.FunctionDef):
            continue
        given = function.args
        others = [*given.posonlyargs, *given.kwonlyargs, given.vararg, given.kwarg]
        assert others == [None, None]
        missing = len(given.args) - len(given.defaults)
        defaults = [NO_DEFAULT] * missing + [ast.literal_eval(node) for node in given.defaults]
        arguments = [
            (argument.arg, TYPES[ast.unparse(argument.annotation)], default)
            for argument, default in zip(given.args, defaults, strict=True)
        ]
        signatures[function.name] = arguments, RETURNS[ast.unparse(function.returns)]
    return signatures


def registered_signature(library: str, name: str) -> tuple[list, list]:
    schema = getattr(getattr(torch.ops, library), name).default._schema
    arguments = [
        (a.name, str(a.type), a.default_value if a.has_default_value() else NO_DEFAULT)
        for a in schema.arguments
    ]
    return arguments, [str(result.type) for result in schema.returns]


def registered_names(library: str) -> set[str]:
    prefix = library + "::"
    names = torch._C._dispatch_get_all_op_names()
    return {name.removeprefix(prefix) for name in names if name.startswith(prefix)}


def test_stubs_of_the_operators_equal_their_schemas():
    stubs = stub_signatures()
    assert set(stubs) == registered_names("flashmla")
    for name, signature in stubs.items():
        assert signature == registered_signature("flashmla", name), name


def test_stubs_equal_the_schemas_under_the_other_library_name():
    assert flashmla._vllm_names_registered
    stubs = stub_signatures()
    assert registered_names("_flashmla_C") == {"fwd_kvcache_mla", "get_mla_metadata"}
    for name in registered_names("_flashmla_C"):
        assert stubs[name] == registered_signature("_flashmla_C", name), name


def test_a_stubbed_name_is_the_operator():
    for name in stub_signatures():
        assert getattr(operators, name) is getattr(torch.ops.flashmla, name)


def test_both_packages_say_that_they_are_typed():
    for package in ("flashmla", "flash_mla"):
        assert (resources.files(package) / "py.typed").is_file()
