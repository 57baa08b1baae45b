"""Machine code of Hopper as nvdisasm prints it."""

from __future__ import annotations

HEAD = """\t.target\tsm_90a

//--------------------- .text.kernel --------------------------
\t.section\t.text.kernel,"ax",@progbits
        .global         kernel
kernel:
.text.kernel:
"""


def listing(*lines: str, control: bool = False) -> str:
    """Return a listing of one function, with labels among its instructions; `control`: with control codes, as jax."""
    text, address = HEAD, 0
    for line in lines:
        if line.endswith(":"):
            text += f"{line}\n"
            continue
        comment = f"/*{address:04x}*/                   {line}"
        text += f"   -:-:0:Y:06        {comment} \n" if control else f"        {comment} ;\n"
        address += 16
    return f'{text}.L_x_99:\n\n\t.section\t.nv.shared.kernel,"aw",@nobits\n'
