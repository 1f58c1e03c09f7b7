"""Fake vendor packages, compiled: libraries that export aclnnMegaMoe and note every argument they get.

The prototypes are the vendor's published ones, written out: what moefuse derives for itself must agree with them.
"""

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

HANDLES = """
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
/* Handles remember what they were made of, so that an argument in the wrong slot shows. */
typedef struct { int64_t tag; char text[256]; } aclTensor;
typedef struct { int64_t tag; uint64_t size; aclTensor **items; } aclTensorList;
typedef struct { int64_t tag; uint64_t size; float *items; } aclFloatArray;
typedef void aclOpExecutor; typedef void *aclrtStream; typedef int aclnnStatus;
enum { TENSOR = 0x7e50, LIST = 0x115e, FLOATS = 0xf10a };
int live_handles;
"""

RUNTIME = (
    HANDLES
    + """
static int refuse_after = -1;
void refuse_handles_after(int count) { refuse_after = count; }
static int refused(void) { return refuse_after >= 0 && refuse_after-- == 0; }
aclTensor *aclCreateTensor(const int64_t *shape, uint64_t dims, int dtype, const int64_t *strides, int64_t offset,
                           int format, const int64_t *storage, uint64_t storage_dims, void *data) {
    if (refused()) return 0;
    aclTensor *t = malloc(sizeof *t);
    t->tag = TENSOR;
    int n = snprintf(t->text, sizeof t->text, "%lld:%d:%d", (long long)data, dtype, format);
    for (uint64_t i = 0; i < dims; i++)
        n += snprintf(t->text + n, sizeof t->text - n, ":%lld/%lld", (long long)shape[i], (long long)strides[i]);
    for (uint64_t i = 0; i < storage_dims; i++)
        n += snprintf(t->text + n, sizeof t->text - n, ":%lld", (long long)storage[i]);
    snprintf(t->text + n, sizeof t->text - n, "+%lld", (long long)offset);
    live_handles++;
    return t;
}
void aclDestroyTensor(aclTensor *t) { if (t->tag != TENSOR) abort(); t->tag = 0; free(t); live_handles--; }
aclTensorList *aclCreateTensorList(aclTensor **items, uint64_t size) {
    if (refused()) return 0;
    aclTensorList *l = malloc(sizeof *l);
    l->tag = LIST; l->size = size; l->items = malloc(size * sizeof *items);
    memcpy(l->items, items, size * sizeof *items);
    live_handles++;
    return l;
}
void aclDestroyTensorList(aclTensorList *l) {
    if (l->tag != LIST) abort();
    for (uint64_t i = 0; i < l->size; i++) aclDestroyTensor(l->items[i]);
    l->tag = 0; free(l->items); free(l); live_handles--;
}
aclFloatArray *aclCreateFloatArray(const float *items, uint64_t size) {
    if (refused()) return 0;
    aclFloatArray *a = malloc(sizeof *a);
    a->tag = FLOATS; a->size = size; a->items = malloc(size * sizeof *items);
    memcpy(a->items, items, size * sizeof *items);
    live_handles++;
    return a;
}
void aclDestroyFloatArray(aclFloatArray *a) { if (a->tag != FLOATS) abort(); free(a->items); free(a); live_handles--; }
const char *aclGetRecentErrMsg(void) { return "EZ0001: said the runtime\\n"; }
"""
)

NOTE = """
static char noted[1 << 18]; static size_t at;
const char *noted_call(void) { return noted; }
static void put(const char *name, const char *text) {
    int n = snprintf(noted + at, sizeof noted - at, "%s=%s\\n", name, text);
    if (n > 0) at += (size_t)n;
}
static void note_t(const char *name, const aclTensor *t) {
    if (t && t->tag != TENSOR) { put(name, "NOT A TENSOR"); return; }
    put(name, t ? t->text : "null");
}
static void note_l(const char *name, const aclTensorList *l) {
    char b[1 << 14] = "null"; size_t n = 0;
    if (l && l->tag != LIST) { put(name, "NOT A LIST"); return; }
    for (uint64_t i = 0; l && i < l->size; i++)
        n += (size_t)snprintf(b + n, sizeof b - n, "%s%s", i ? "," : "", l->items[i]->text);
    put(name, b);
}
static void note_a(const char *name, const aclFloatArray *a) {
    char b[256] = "null"; size_t n = 0;
    if (a && a->tag != FLOATS) { put(name, "NOT FLOATS"); return; }
    for (uint64_t i = 0; a && i < a->size; i++)
        n += (size_t)snprintf(b + n, sizeof b - n, "%s%g", i ? "," : "", a->items[i]);
    put(name, b);
}
static void note_i(const char *name, int64_t v) {
    char b[32]; snprintf(b, sizeof b, "%lld", (long long)v); put(name, b);
}
static void note_s(const char *name, const char *v) { put(name, v ? v : "null"); }
static void note_f(const char *name, float v) { char b[32]; snprintf(b, sizeof b, "%g", v); put(name, b); }
"""

R0 = """const aclTensor *context, const aclTensor *x, const aclTensor *topkIds, const aclTensor *topkWeights,
const aclTensorList *weight1, const aclTensorList *weight2, const aclTensorList *weightScales1Opt,
const aclTensorList *weightScales2Opt, const aclTensor *xActiveMaskOpt, const aclTensor *scalesOpt,
int64_t moeExpertNum, int64_t epWorldSize, int64_t cclBufferSize, int64_t maxRecvTokenNum, int64_t dispatchQuantMode,
int64_t dispatchQuantOutType, int64_t combineQuantMode, char *commAlg, int64_t globalBs, aclTensor *yOut,
aclTensor *expertTokenNumsOut, uint64_t *workspaceSize, aclOpExecutor **executor"""
R1 = """const aclTensor *context, const aclTensor *x, const aclTensor *topkIds, const aclTensor *topkWeights,
const aclTensorList *weight1, const aclTensorList *weight2, const aclTensorList *weightScales1Optional,
const aclTensorList *weightScales2Optional, const aclTensorList *bias1Optional, const aclTensorList *bias2Optional,
const aclTensor *xActiveMaskOptional, int64_t moeExpertNum, int64_t epWorldSize, int64_t cclBufferSize,
int64_t maxRecvTokenNum, int64_t dispatchQuantMode, int64_t dispatchQuantOutDtype, int64_t combineQuantMode,
const char *commAlg, int64_t numMaxTokensPerRank, const char *activation, float activationClamp,
aclTensor *yOut, aclTensor *expertTokenNumsOut, uint64_t *workspaceSize, aclOpExecutor **executor"""
SHARED = """const aclTensorList *sharedWeight1Optional, const aclTensorList *sharedWeight2Optional,
const aclTensorList *sharedWeightScales1Optional, const aclTensorList *sharedWeightScales2Optional,
const aclTensorList *sharedBias1Optional, const aclTensorList *sharedBias2Optional,"""
R4 = R1.replace("xActiveMaskOptional,", f"xActiveMaskOptional, {SHARED}").replace(
    "float activationClamp,", "float activationClamp, int64_t topoType, int64_t rankNumPerServer,"
)
R6 = R4.replace(
    "float activationClamp, int64_t topoType, int64_t rankNumPerServer,",
    "const aclFloatArray *activationParams, int64_t topoType, int64_t rankNumPerServer, int64_t topkWeightsType,",
)
FOREIGN = """const aclTensor *x, const aclTensor *gate, const aclTensor *weights, int64_t groups, aclTensor *yOut,
uint64_t *workspaceSize, aclOpExecutor **executor"""
PROTOTYPES = {"R0": R0, "R1": R1, "R4": R4, "R6": R6, "foreign": FOREIGN}

NOTES = {
    "aclTensor *": "note_t",
    "aclTensorList *": "note_l",
    "aclFloatArray *": "note_a",
    "int64_t": "note_i",
    "char *": "note_s",
    "float": "note_f",
}


def parameters(prototype: str) -> list[tuple[str, str]]:
    """(type, name) of each argument but the last two."""
    found = []
    for part in " ".join(prototype.split()).split(",")[:-2]:
        words = part.replace("const ", "").strip()
        name = words.split()[-1].lstrip("*")
        found.append((words[: -len(name)].strip(), name))
    return found


def workspace_source(prototype: str) -> str:
    """The first stage: notes each argument by its own name and type."""
    notes = "".join(f' {NOTES[kind]}("{name}", {name});' for kind, name in parameters(prototype))
    return (
        f"int next_status; uint64_t next_size = 64;\n"
        f"aclnnStatus aclnnMegaMoeGetWorkspaceSize({prototype}) {{ at = 0; noted[0] = 0;{notes}"
        " *workspaceSize = next_size; *executor = (void *)0x5eed; return next_status; }\n"
    )


EXECUTE = """
int executions; int execute_status;
aclnnStatus aclnnMegaMoe(void *workspace, uint64_t size, aclOpExecutor *executor, aclrtStream stream) {
    if (executor != (void *)0x5eed) return 161001;
    note_i("workspace", (int64_t)workspace); note_i("size", (int64_t)size); note_i("stream", (int64_t)stream);
    executions++;
    return execute_status;
}
"""


def build(source: str, path: Path, *flags: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    code = path.with_suffix(".c")
    code.write_text(source)
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-w", *flags, str(code), "-o", str(path)], check=True)
    return path


@dataclass(frozen=True)
class Package:
    """A vendor package on disk."""

    folder: Path

    @property
    def library(self) -> Path:
        return self.folder / "op_api" / "lib" / "libcust_opapi.so"

    def header(self, prototype: str) -> "Package":
        path = self.folder / "op_api" / "include" / "aclnnop" / "aclnn_mega_moe.h"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            "/* first stage, */ // a comment (with parentheses)\n"
            f"aclnnStatus aclnnMegaMoeGetWorkspaceSize(\n{prototype});\n"
            "aclnnStatus aclnnMegaMoe(void *, uint64_t, aclOpExecutor *, aclrtStream);\n"
        )
        return self

    def info(self, prototype: str, *, extra: str = "") -> "Package":
        path = (
            self.folder
            / "op_impl"
            / "ai_core"
            / "tbe"
            / "config"
            / "ascend910_93"
            / "aic-ascend910_93-ops-info.json"
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        inputs, attributes = [], ["transpose_weight1", "weight1_interleave", *([extra] if extra else [])]
        for kind, name in parameters(prototype):
            plain = plain_name(name)
            if kind.startswith(("aclTensor *", "aclTensorList *")):
                inputs += [plain] if not name.endswith("Out") else []
            else:
                attributes.append(plain)
        operator = {f"input{i}": {"name": name} for i, name in enumerate(inputs)}
        operator["attr"] = {"list": ",".join(attributes)}
        path.write_text(json.dumps({"MegaMoe": operator, "Other": {}}))
        return self

    def version(self, version: str) -> "Package":
        (self.folder / "version.info").write_text(f"custom_opp_compiler_version={version}\n")
        return self


def plain_name(name: str) -> str:
    """topkIdsOptional -> topk_ids."""
    short = name.removesuffix("Optional").removesuffix("Opt").removesuffix("Out")
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in short)


def package(folder: Path, prototype: str, *, workspace: bool = True, execute: bool = True) -> Package:
    """A package whose library has one or both symbols."""
    made = Package(folder)
    source = (
        HANDLES + NOTE + (workspace_source(prototype) if workspace else "") + (EXECUTE if execute else "")
    )
    build(source, made.library)
    return made
