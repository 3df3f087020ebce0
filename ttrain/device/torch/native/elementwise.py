"""C++ of elementwise programs: one pass over memory for any number of ops."""

from __future__ import annotations

from math import prod

from ttrain.core.random_bits import keep_threshold
from ttrain.core.spec import DType, TensorSpec
from ttrain.device.torch.loops import COSTS, LoopNest, expressions, spelled
from ttrain.device.torch.native.codegen import c_float, c_type

EXPRESSIONS = expressions("cpp", "both")
UNSUITED = ("dropout", "dropout_mask", "embedding", "accumulate", "assign", "expand")  # for loops over lists of tensors


class CppNest(LoopNest):
    """C++ of one program. If it `rounds`, values between the steps too, so that it doesn't matter what is fused."""

    rounds = False

    @property
    def kinds(self) -> list[str]:
        """Type in C++ of every value where nothing is fused: that of a step's first operand, of a cast or constant."""
        found = [c_type(spec) for spec in self.inputs]
        for name, operands, given in self.program:
            made = dict(given).get("spec") or TensorSpec((), dict(given).get("dtype", DType.FP32))
            own = "dtype" in dict(given) or not operands or "spec" in dict(given)
            found.append(c_type(made) if own else found[operands[name == "embedding"]])
        return found

    @property
    def cost(self) -> float:
        """Work, in additions of one element."""
        each = 1 + sum(COSTS.get(name, 1) for name, _, _ in self.program)
        return each * prod(self.shape)

    def source(self, threads: int) -> str:
        """The body of a function that takes the addresses of inputs and outputs."""
        loops = self.loops
        step = "\n".join(self._step())
        if loops.rows == 1:
            opening = f"over_columns<{loops.width}, {threads}>([&](i64 j, auto group) {{"
            body = [*self._row(), "const i64 i = 0; (void)i;", opening, step, "});"]
        else:
            body = [
                f"over_rows<{loops.rows}, {threads}>([&](i64 i) {{",
                *self._row(),
                f"over_groups<{loops.width}>(0, {loops.width}, [&](i64 j, auto group) {{",
                step,
                "});",
                "});",
            ]
        return "\n".join([*self._pointers(), *body])

    def _pointers(self) -> list[str]:
        lines = []
        read = {operand for operand in self.loops.strides if operand >= 0}
        read |= {operands[1] for operands in self.lookups.values()}
        for item in sorted(read):
            kind = c_type(self.inputs[item])
            lines.append(f"const {kind}* x{item} = in<{kind}>(a, {item});")
        for position, spec in enumerate(self.outputs):
            at = len(self.inputs) + position
            lines.append(f"{c_type(spec)}* y{position} = out<{c_type(spec)}>(a, {at});")
        for step, seed in self.seeds.items():
            settings = dict(self.program[step][2])
            made = mask(f"*in<i64>(a, {seed})", settings["p"], settings["stream"])
            lines.append(f"const Mask mask{step} = {made};")
        return lines

    def _row(self) -> list[str]:
        """List the lines for values that stay the same along a row."""
        lines = []
        for item, strides in self.loops.strides.items():
            offset = self.loops.offset(item) if self.loops.rows > 1 else "0"
            if item < 0 or item in self.ids:
                continue
            if strides[-1] == 0:
                lines.append(f"const vf v{item} = splat(get(x{item} + ({offset})));")
            else:
                lines.append(f"const i64 at{item} = {offset};")
        for step, (ids, weight, *_) in self.lookups.items():
            spec = self.inputs[weight]
            offset = self.loops.offset(ids) if self.loops.rows > 1 else "0"
            count, width = spec.shape
            lines.append(f"const i64 id{step} = x{ids}[{offset}];")
            lines.append(f"const bool known{step} = u64(id{step}) < {count};  // else NaN, not other memory")
            lines.append(f"const {c_type(spec)}* row{step} = x{weight} + (known{step} ? id{step} * {width} : 0);")
        return lines

    def _step(self) -> list[str]:
        """A group of vectors: loads, the program, stores. Value 0 of vector u is v0[u]."""
        count, at = len(self.inputs), "j + u * W"
        index = f"i * {self.loops.width} + {at}"
        moving = [item for item, strides in self.loops.strides.items() if item >= 0 and strides[-1]]
        loaded = [item for item in moving if item not in self.ids]
        kinds = self.kinds if self.rounds else ["float"] * (count + len(self.program))
        lines = [_each(item, f"load(x{item} + at{item} + {at}, group.lanes)") for item in loaded]
        for number, made in enumerate(self.program):
            operands = [f"v{item}[u]" if item in loaded or item >= count else f"v{item}" for item in made[1]]
            expression = spelled(made, EXPRESSIONS, c_float, operands, step=number, index=index, at=at)
            lines.append(_each(count + number, f"rounded<{kinds[count + number]}>(apart({expression}))"))
        for position, step in enumerate(self.results):
            lines.append(f"EACH_VECTOR store(y{position} + {index}, v{count + step}[u], group.lanes);")
        return lines


def _each(value: int, expression: str) -> str:
    """C++ that makes a value of every vector u of a group."""
    return f"vf v{value}[group.vectors]; EACH_VECTOR v{value}[u] = {expression};"


def mask(seed: str, p: float, stream: int) -> str:
    """C++ of a dropout mask (see core/random_bits.py for its definition)."""
    key = f"stream_key({seed}, {stream & 0xFFFFFFFF}u)"
    return f"Mask{{{key}, {keep_threshold(p)}u, {c_float(1 / (1 - p))}}}"


NO_MASK = "Mask{}"  # where nothing is dropped
