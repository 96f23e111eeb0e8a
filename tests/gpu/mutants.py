"""Faulty kernels, and the jobs by which they are found.

A file of tests/gpu/mutants is a patch. Before it stand the story, and how it is found:

    # lanes read what others have not written yet
    # check: thread; kernel: one_bit.cu; symptom: data race
"""

import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gpu import codec_jobs, low_rank_jobs, step_jobs, top_k_jobs
from gpu.codec_jobs import CODECS, TYPES
from gpu.job import Job

FOLDER = Path(__file__).resolve().parent / "mutants"
KERNELS = Path(__file__).resolve().parents[2] / "kernels"
FILES = {"cast.cu": ["float16", "bfloat16"], "min_max8.cu": ["minmax8"], "int4.cu": ["int4"], "qsgd.cu": ["qsgd"],
         "one_bit.cu": ["onebit"]}  # fmt: skip
# a job's name, and what makes it
Named = tuple[str, Callable[[], Job]]
ELEMENTWISE = {"momentum.cu": step_jobs.momentum_job, "outer.cu": step_jobs.outer_job}


def codec_jobs_of(codec: str) -> list[Named]:
    one, average = codec_jobs.codec_job, codec_jobs.average_job
    jobs = [(f"{codec} {dtype}", partial(one, codec, dtype, skew=skew)) for dtype in TYPES for skew in (0, 1)]
    jobs.append((f"{codec} average", partial(average, codec, 3)))
    jobs.append((f"{codec} average of one", partial(average, codec, 1, with_residual=False)))
    return jobs


def top_k_jobs_of() -> list[Named]:
    jobs = [(f"top_k {dtype}", partial(top_k_jobs.top_k_job, dtype, fed, tile, skew))
            for dtype in TYPES for fed, tile, skew in ((False, 16384, 0), (True, 256, 1))]  # fmt: skip
    jobs += [("top_k of equal values", top_k_jobs.hard_job), ("top_k of blocks", top_k_jobs.blocks_job)]
    return [*jobs, ("strangers", top_k_jobs.stranger_job)]


def values_jobs() -> list[Named]:
    jobs = [(f"divide {dtype}", partial(codec_jobs.divide_job, dtype, skew)) for dtype in TYPES for skew in (0, 1)]
    mix = codec_jobs.mix_job
    jobs += [(f"mix {pair}", partial(mix, *pair, weighted)) for pair in codec_jobs.MIXES for weighted in (False, True)]
    return [*jobs, ("counted", codec_jobs.counted_job)]


def families() -> dict[str, list[Named]]:
    """Everything, on all golden vectors."""
    return {
        "codecs": [job for codec in CODECS for job in codec_jobs_of(codec)],
        "values": values_jobs(),
        "steps": [job for one in ELEMENTWISE.values() for job in step_jobs.elementwise_jobs(one)],
        "copies": [job for codec in (*CODECS, step_jobs.PLAIN) for job in step_jobs.replicas_jobs(codec)],
        "top_k": top_k_jobs_of(),
        "low_rank": low_rank_jobs.low_rank_jobs(),
    }


def all_jobs() -> list[Named]:
    return [job for family in families().values() for job in family]


def race_jobs(kernel: str | None = None) -> list[Named]:
    """Little work that makes threads meet: the thread sanitizer is slow, and values do not matter to it."""
    jobs = []
    for file, codecs in FILES.items():
        if kernel in (None, file):
            cases = ["odd_length", "not_finite"] if file == "one_bit.cu" else ["odd_length"]
            jobs += [(f"{codec}", partial(codec_jobs.codec_job, codec, "f32", cases, tile=4096)) for codec in codecs]
            jobs += [(f"{codec} average", partial(codec_jobs.average_job, codec, 3, cases)) for codec in codecs]
            jobs += [job for codec in codecs for job in step_jobs.replicas_jobs(codec, ["f32"], [0], cases)]
    meets = {"dtypes": ["f32"], "skews": [0], "cases": ["odd_length", "not_finite"]}
    for file, job in ELEMENTWISE.items():
        jobs += step_jobs.elementwise_jobs(job, **meets) if kernel in (None, file) else []
    if kernel in (None, "replicas.cu"):
        jobs += step_jobs.replicas_jobs(step_jobs.PLAIN, **meets)
    if kernel in (None, "top_k.cu"):
        job = partial(top_k_jobs.top_k_job, "f32", True, 1024, cases=["odd_length", "not_finite"])
        jobs.append(("top_k", job))
    if kernel in (None, "low_rank.cu"):
        jobs.append(("low_rank", partial(low_rank_jobs.low_rank_job, "f32", shapes=[(130, 9, 2)])))
    return jobs


@dataclass(frozen=True)
class Mutant:
    name: str
    story: str
    check: str
    kernel: str
    symptom: str
    path: Path

    @property
    def sanitizer(self) -> str | None:
        return None if self.check in ("plain", "ptx") else self.check

    def apply(self, folder: Path) -> None:
        """Copies the sources and spoils them."""
        folder.mkdir(parents=True)
        for path in [*KERNELS.glob("*.cu"), *KERNELS.glob("*.cuh")]:
            shutil.copy(path, folder)
        subprocess.run(["patch", "-p2", "--quiet", "--fuzz=0", "-d", str(folder), "-i", str(self.path)], check=True)

    def jobs(self) -> list[Named]:
        if self.check == "thread":
            return race_jobs(self.kernel)
        if self.kernel == "top_k.cu":
            return top_k_jobs_of()
        if self.kernel == "low_rank.cu":
            return low_rank_jobs.low_rank_jobs(["f32"], [1])
        if self.kernel in ELEMENTWISE:
            return step_jobs.elementwise_jobs(ELEMENTWISE[self.kernel])
        if self.kernel == "replicas.cu":
            return step_jobs.replicas_jobs(step_jobs.PLAIN)
        codecs = FILES[self.kernel]
        jobs = [job for codec in codecs for job in codec_jobs_of(codec)]
        return jobs + [job for codec in codecs for job in step_jobs.replicas_jobs(codec)]


def found(ptx: bool = False) -> list[Mutant]:
    """The mutants that the shim finds, or those that only the PTX shows."""
    every = []
    for path in sorted(FOLDER.glob("*.diff")):
        story, how = re.match(r"# (.*)\n# (.*)\n", path.read_text(encoding="utf-8")).groups()
        fields = dict(part.split(": ", 1) for part in how.split("; "))
        every.append(Mutant(path.stem, story, fields["check"], fields["kernel"], fields.get("symptom", ""), path))
    return [one for one in every if (one.check == "ptx") == ptx]
