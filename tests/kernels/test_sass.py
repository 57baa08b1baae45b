"""Writes to registers of a wgmma in flight are found in machine code, on every path."""

from __future__ import annotations

import pytest

from pallas_kernels.gate import sass
from tests.support.kernels.machine import listing

LEFT = "HGMMA.64x64x16.F32.BF16 R56, R24, gdesc[UR8].tnspB, R56"  # reads R24 to R27, adds to R56 to R87
SHARED = "HGMMA.64x64x16.F32.BF16 R56, gdesc[UR8], RZ, !UPT"
WAIT, WAIT_FOR_OLDER = "WARPGROUP.DEPBAR.LE gsb0, 0x0", "WARPGROUP.DEPBAR.LE gsb0, 0x1"
END = ("EXIT", ".L_x_9:", "BRA `(.L_x_9)")


@pytest.mark.parametrize("control", [False, True])
@pytest.mark.parametrize(
    ("lines", "count"),
    [
        pytest.param((f"{LEFT}, gsb0", "MOV R27, R1", WAIT), 1, id="the left operand"),
        pytest.param((f"{LEFT}, gsb0", "MOV R87, R1", WAIT), 1, id="the accumulator"),
        pytest.param((f"{SHARED}, gsb0", "MOV R24, R1", WAIT), 0, id="an operand in shared memory"),
        pytest.param((f"{LEFT}, gsb0", "MOV R28, R1", "MOV R88, R1", "MOV R55, R1", WAIT), 0, id="others"),
        pytest.param((f"{LEFT}, gsb0", WAIT, "MOV R24, R1"), 0, id="after the wait"),
        pytest.param((LEFT, WAIT, "MOV R24, R1"), 1, id="a wait for no group"),
        pytest.param((LEFT, f"{LEFT}, gsb0", WAIT, "MOV R24, R1"), 0, id="a group of two"),
        pytest.param((f"{LEFT}, gsb0", "@P0 " + WAIT, "MOV R24, R1"), 1, id="a wait that may not happen"),
        pytest.param(
            (f"{LEFT}, gsb0", LEFT.replace("R24", "R28") + ", gsb0", WAIT_FOR_OLDER, "MOV R24, R1", "MOV R28, R1"),
            1,
            id="the newest group stays in flight",
        ),
        pytest.param(
            (f"{LEFT}, gsb0", "@P0 BRA `(.L_x_1)", WAIT, "EXIT", ".L_x_1:", "@!P1 MOV R25, R1", WAIT),
            1,
            id="behind a branch",
        ),
        pytest.param(
            (f"{LEFT}, gsb0", "@P0 BRA `(.L_x_1)", WAIT, ".L_x_1:", "MOV R25, R1"), 1, id="a wait in one of two paths"
        ),
        pytest.param(
            (f"{LEFT}, gsb0", "@P0 BRA `(.L_x_1)", WAIT, "BRA `(.L_x_2)", ".L_x_1:", WAIT, ".L_x_2:", "MOV R25, R1"),
            0,
            id="a wait in both branches",
        ),
        pytest.param(
            (".L_x_1:", "MOV R24, R1", f"{LEFT}, gsb0", "@P0 BRA `(.L_x_1)", WAIT), 1, id="over the back edge of a loop"
        ),
        pytest.param(
            (".L_x_1:", "MOV R24, R1", f"{LEFT}, gsb0", WAIT, "@P0 BRA `(.L_x_1)"), 0, id="a loop that waits"
        ),
        pytest.param(
            (".L_x_1:", "MOV R28, R1", WAIT_FOR_OLDER, "MOV R24, R1", f"{LEFT}, gsb0", f"{SHARED}, gsb0",
             "@P0 BRA `(.L_x_1)", WAIT),
            0,
            id="a pipelined loop whose older group is waited for",
        ),
        pytest.param(
            ("BSSY B0, `(.L_x_1)", "BSYNC B0", ".L_x_1:", "MOV R24, R1", "BSSY B0, `(.L_x_2)", f"{LEFT}, gsb0",
             "BSYNC B0", ".L_x_2:", WAIT),
            0,
            id="threads meet at the end of their own region",
        ),
        pytest.param(
            ("BSSY B0, `(.L_x_2)", f"{LEFT}, gsb0", "@P0 BRA `(.L_x_1)", WAIT, "BSYNC B0", ".L_x_1:", "BSYNC B0",
             ".L_x_2:", "MOV R25, R1"),
            1,
            id="where branches meet again",
        ),
        pytest.param((f"{LEFT}, gsb0", "BRA `(.L_x_1)", "MOV R24, R1", ".L_x_1:", WAIT), 0, id="what is not reached"),
        pytest.param(
            (f"{LEFT}, gsb0", "CALL.REL.NOINC `(.L_x_1)", WAIT, "EXIT", ".L_x_1:", "MOV R24, R1", "RET.REL.NODEC R2"),
            1,
            id="in a call",
        ),
    ],
)  # fmt: skip
def test_writes_to_registers_in_flight_are_found_on_every_path(
    lines: tuple[str, ...], count: int, control: bool
) -> None:
    found = sass.hazards(listing(*lines, *END, control=control))
    assert len(found) == count, found
    assert all(said.startswith("kernel: ") and "in flight" in said for said in found)


@pytest.mark.parametrize(
    ("line", "registers"),
    [
        ("MOV R5, R1", {5}),
        ("LDS.128 R4, [R1]", {4, 5, 6, 7}),
        ("LDC.64 R4, c[0x0][0x210]", {4, 5}),
        ("IMAD.WIDE.U32 R4, R134, 0x4, R4", {4, 5}),
        ("CS2R R6, SRZ", {6, 7}),
        ("CS2R.32 R6, SRZ", {6}),
        ("LDSM.16.M88.4 R8, [R1]", {8, 9, 10, 11}),
        ("HMMA.16816.F32.BF16 R8, R4, R6, R8", {8, 9, 10, 11}),
        ("SHF.R.U64 R5, R0, 0x5, R8", {5}),
        ("SHFL.IDX PT, R2, R0, RZ, 0x1f", {2}),
        ("LOP3.LUT P0, R3, R1, 0x1, RZ, 0xc0, !PT", {3}),
        ("ISETP.EQ.U32.AND P1, PT, RZ, R41, P0", set()),
        ("ST.E.64 desc[UR6][R4.64], R8", set()),
        ("STS [R4], R8", set()),
        ("BAR.SYNC.DEFER_BLOCKING R5, 0x80", set()),
        ("R2UR UR4, R5", set()),
        ("SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R2", set()),
        ("WARPGROUP.ARRIVE", set()),
    ],
)
def test_the_registers_that_an_instruction_writes(line: str, registers: set[int]) -> None:
    [function] = sass.functions(listing(line))
    assert set(sass.written(function.code[0])) == registers


@pytest.mark.parametrize(
    ("product", "accumulator", "left"),
    [
        ("HGMMA.64x128x16.F32.BF16 R24, R88, gdesc[UR4].tnspB, R24", 64, 4),
        ("HGMMA.64x32x16.F16 R24, gdesc[UR8], R24, gsb0", 8, 0),
        ("QGMMA.64x16x32.F32.E4M3.E4M3 R24, R88, gdesc[UR4], RZ, !UPT", 8, 4),
    ],
)
def test_the_registers_of_a_product(product: str, accumulator: int, left: int) -> None:
    [function] = sass.functions(listing(product))
    assert tuple(map(len, sass.in_flight(function.code[0]))) == (accumulator, left)


@pytest.mark.parametrize("jump", ["BRX R4 -0x20", "BRA `(.L_x_7)"])
def test_jumps_that_cannot_be_followed_are_an_error(jump: str) -> None:
    with pytest.raises(ValueError, match="of kernel"):
        sass.hazards(listing(f"{LEFT}, gsb0", jump, WAIT))
    assert sass.hazards(listing("MOV R1, R2", jump)) == [], "without products there is nothing to follow"


@pytest.mark.parametrize(
    ("lines", "length"),
    [
        pytest.param((".L_x_1:", SHARED, "MOV R1, R2", "@P0 BRA `(.L_x_1)"), 3, id="one"),
        pytest.param(
            (".L_x_1:", "MOV R1, R2", ".L_x_2:", SHARED, "@P0 BRA `(.L_x_2)", "@P1 BRA `(.L_x_1)"), 2, id="inner"
        ),
        pytest.param(
            (".L_x_1:", SHARED, "@!P0 BRA `(.L_x_3)", ".L_x_2:", "@P1 BRA `(.L_x_1)", "EXIT", "MOV R1, R2", ".L_x_3:",
             "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R2", "@!P0 BRA `(.L_x_3)", "BRA `(.L_x_2)"),
            6,
            id="with its wait, which is elsewhere",
        ),
        pytest.param((".L_x_1:", "MOV R1, R2", "@P0 BRA `(.L_x_1)", SHARED), 0, id="a loop without products"),
        pytest.param(
            ("BSSY B0, `(.L_x_3)", "BSYNC B0", ".L_x_3:", ".L_x_1:", SHARED, "BSSY B0, `(.L_x_2)", "BSYNC B0",
             ".L_x_2:", "@P0 BRA `(.L_x_1)"),
            4,
            id="with a barrier that another region has too",
        ),
    ],
)  # fmt: skip
def test_the_inner_loop_is_the_longest_with_products(lines: tuple[str, ...], length: int) -> None:
    assert sass.inner_loop(listing(*lines, *END)) == length
