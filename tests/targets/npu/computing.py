"""A fake vendor library that computes: aclnnMegaMoe of one rank, on the CPU, in plain loops.

Its context is a table of the addresses of all ranks' expert matrices, so that one process can be every rank in turn;
a rank's own matrices must be those that it passes. What a real operator refuses (dtypes, shapes, tokens above the
maximum, ids out of range, another matrix than [K, N]) is refused here with the operator's own code.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from moefuse.targets.npu import identify
from moefuse.targets.npu.library import find
from moefuse.targets.npu.machine import Machine
from tests.targets.npu.vendor import PROTOTYPES, Package, build

HANDLES = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
typedef struct { int64_t shape[4], strides[4]; uint64_t dims; int dtype; void *data; } aclTensor;
typedef struct { uint64_t size; aclTensor **items; } aclTensorList;
typedef struct { uint64_t size; float *items; } aclFloatArray;
typedef void *aclrtStream; typedef int aclnnStatus;
enum { FLOAT = 0, INT8 = 2, INT32 = 3, INT64 = 9, BF16 = 27 };
"""

RUNTIME = (
    HANDLES
    + """
int live_handles;
aclTensor *aclCreateTensor(const int64_t *shape, uint64_t dims, int dtype, const int64_t *strides, int64_t offset,
                           int format, const int64_t *storage, uint64_t storage_dims, void *data) {
    aclTensor *t = calloc(1, sizeof *t);
    memcpy(t->shape, shape, dims * sizeof *shape); memcpy(t->strides, strides, dims * sizeof *strides);
    t->dims = dims; t->dtype = dtype; t->data = data; live_handles++;
    return t;
}
void aclDestroyTensor(aclTensor *t) { free(t); live_handles--; }
aclTensorList *aclCreateTensorList(aclTensor **items, uint64_t size) {
    aclTensorList *l = malloc(sizeof *l);
    l->size = size; l->items = malloc(size * sizeof *items); memcpy(l->items, items, size * sizeof *items);
    live_handles++;
    return l;
}
void aclDestroyTensorList(aclTensorList *l) {
    for (uint64_t i = 0; i < l->size; i++) aclDestroyTensor(l->items[i]);
    free(l->items); free(l); live_handles--;
}
aclFloatArray *aclCreateFloatArray(const float *items, uint64_t size) {
    aclFloatArray *a = malloc(sizeof *a);
    a->size = size; a->items = malloc(size * sizeof *items); memcpy(a->items, items, size * sizeof *items);
    live_handles++;
    return a;
}
void aclDestroyFloatArray(aclFloatArray *a) { free(a->items); free(a); live_handles--; }
"""
)

LAYER = """
typedef struct {
    int64_t T, K, H, I, E, first, count; const int64_t *table;
    const uint16_t *x; const int32_t *ids; const float *weights; const int8_t *mask;
    float clamp; uint16_t *y; int32_t *nums;
} Plan;
typedef Plan aclOpExecutor;
int64_t calls, last_rows, last_masked, computes = 1;  /* computes: 0 leaves y zero, to save time */
static float widen(uint16_t v) { uint32_t bits = (uint32_t)v << 16; float f; memcpy(&f, &bits, 4); return f; }
static uint16_t narrow(float f) {
    uint32_t bits; memcpy(&bits, &f, 4);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
static int is(const aclTensor *t, int dtype, uint64_t dims) {
    if (!t || t->dtype != dtype || t->dims != dims) return 0;
    for (int64_t i = (int64_t)dims - 1, wanted = 1; i >= 0; wanted *= t->shape[i--])
        if (t->shape[i] > 1 && t->strides[i] != wanted) return 0;
    return 1;
}
static int matrices(const aclTensorList *l, int64_t count, int64_t rows, int64_t columns, const int64_t *addresses) {
    if (!l || (int64_t)l->size != count) return 0;
    for (int64_t e = 0; e < count; e++) {
        const aclTensor *t = l->items[e];
        if (!is(t, BF16, 2) || t->shape[0] != rows || t->shape[1] != columns) return 0;
        if ((int64_t)t->data != addresses[e]) return 0;
    }
    return 1;
}
static aclnnStatus plan(const aclTensor *context, const aclTensor *x, const aclTensor *ids, const aclTensor *weights,
                        const aclTensorList *w1, const aclTensorList *w2, const aclTensor *mask, int64_t E, int64_t W,
                        int64_t most, const char *activation, float clamp, aclTensor *y, aclTensor *nums,
                        uint64_t *size, aclOpExecutor **executor) {
    if (!context || !x || !ids || !weights || !w1 || !w2 || !activation || !y || !nums) return 161001;
    if (context->dtype != INT64 || !is(x, BF16, 2) || !is(ids, INT32, 2) || !is(weights, FLOAT, 2)) return 161002;
    const int64_t *table = context->data;
    int64_t rank = table[0], local = E / W, T = x->shape[0], K = ids->shape[1], H = x->shape[1];
    if (table[1] != E || T < 1 || T > most || ids->shape[0] != T || weights->shape[0] != T) return 161002;
    if (weights->shape[1] != K || strcmp(activation, "swiglu")) return 161002;
    if (mask && (!is(mask, INT8, 1) || mask->shape[0] != T)) return 161002;
    if (!is(y, BF16, 2) || y->shape[0] != T || y->shape[1] != H || !is(nums, INT32, 1)) return 161002;
    if (nums->shape[0] != local || w2->size < 1) return 161002;
    int64_t I = w2->items[0]->shape[0];
    if (!matrices(w1, local, H, 2 * I, table + 2 + rank * local)) return 161002;
    if (!matrices(w2, local, I, H, table + 2 + E + rank * local)) return 161002;
    Plan *p = malloc(sizeof *p);
    *p = (Plan){T, K, H, I, E, rank * local, local, table, x->data, ids->data, weights->data,
                mask ? mask->data : 0, clamp, y->data, nums->data};
    *size = (uint64_t)(2 * I + H) * sizeof(float) + (uint64_t)T;  /* grows with the tokens, as real ones do */
    *executor = p;
    return 0;
}
static float activate(float g, float u, float c) {
    g = fminf(g, c); u = fmaxf(fminf(u, c), -c);
    return g / (1 + expf(-g)) * u;
}
static void expert(const Plan *p, int64_t t, int64_t e, float weight, float *h, float *y) {
    const uint16_t *w1 = (const uint16_t *)p->table[2 + e], *w2 = (const uint16_t *)p->table[2 + p->E + e];
    int64_t N = 2 * p->I;
    memset(h, 0, (size_t)N * sizeof *h);
    for (int64_t k = 0; k < p->H; k++) {
        float x = widen(p->x[t * p->H + k]);
        for (int64_t n = 0; n < N; n++) h[n] += x * widen(w1[k * N + n]);
    }
    for (int64_t i = 0; i < p->I; i++) {
        float a = weight * activate(h[i], h[p->I + i], p->clamp);
        for (int64_t n = 0; n < p->H; n++) y[n] += a * widen(w2[i * p->H + n]);
    }
}
static aclnnStatus run(void *workspace, Plan *p) {
    float *h = workspace, *y = h + 2 * p->I;
    aclnnStatus status = 0;
    last_rows = p->T; last_masked = 0; calls++;
    memset(p->nums, 0, (size_t)p->count * sizeof *p->nums);  /* what this rank's own tokens bring it */
    for (int64_t t = 0; t < p->T && !status; t++) {
        memset(y, 0, (size_t)p->H * sizeof *y);
        for (int64_t k = 0; k < p->K; k++) {
            int32_t e = p->ids[t * p->K + k];
            if (e < 0 || e >= p->E) { status = 507035; break; }
            if (p->mask && !p->mask[t]) { last_masked += k == 0; continue; }
            if (e >= p->first && e < p->first + p->count) p->nums[e - p->first]++;
            if (computes) expert(p, t, e, p->weights[t * p->K + k], h, y);
        }
        for (int64_t n = 0; n < p->H; n++) p->y[t * p->H + n] = narrow(y[n]);
    }
    return status;
}
aclnnStatus aclnnMegaMoe(void *workspace, uint64_t size, aclOpExecutor *p, aclrtStream stream) {
    aclnnStatus (*on_stream)(aclrtStream, aclnnStatus (*)(void *, Plan *), void *, Plan *);
    *(void **)&on_stream = stream ? dlsym(RTLD_DEFAULT, "emulated_call") : 0;
    if (on_stream) return on_stream(stream, run, workspace, p);  /* the emulated runtime keeps it while it captures */
    aclnnStatus status = run(workspace, p);
    free(p);
    return status;
}
"""
FIRST = """
aclnnStatus aclnnMegaMoeGetWorkspaceSize(%s) {
    return plan(context, x, topkIds, topkWeights, weight1, weight2, xActiveMaskOptional, moeExpertNum, epWorldSize,
                numMaxTokensPerRank, activation, %s, yOut, expertTokenNumsOut, workspaceSize, executor);
}
"""
CLAMP = {"R1": "activationClamp", "R6": "activationParams ? activationParams->items[0] : NAN"}


@dataclass(frozen=True)
class Fake:
    """A machine whose library computes. count and set: the library's own numbers, by name."""

    machine: Machine

    def count(self, name: str) -> int:
        return ctypes.c_int64.in_dll(self.machine.library.handle, name).value

    def set(self, name: str, value: int) -> None:
        ctypes.c_int64.in_dll(self.machine.library.handle, name).value = value

    @property
    def live_handles(self) -> int:
        assert self.machine.runtime is not None
        return ctypes.c_int.in_dll(self.machine.runtime, "live_handles").value


def fake(folder: Path, revision: str, soc: str = "Ascend910_9382", *flags: str) -> Fake:
    """Build one, with the header that says its revision."""
    package = Package(folder / revision)
    source = HANDLES + LAYER + FIRST % (PROTOTYPES[revision], CLAMP[revision])
    build(source, package.library, "-O3", *flags)
    package.header(PROTOTYPES[revision])
    runtime = ctypes.CDLL(str(build(RUNTIME, folder / "libfake_acl.so", *flags)))
    environment = {"ASCEND_CUSTOM_OPP_PATH": str(package.folder)}
    library = find(environment)
    return Fake(Machine(soc, library, identify(library, environment=environment), None, runtime))


def table(rank: int, w1: Sequence[Tensor], w2: Sequence[Tensor]) -> Tensor:
    """The context of one rank: all experts' matrices, by address."""
    return torch.tensor([rank, len(w1), *(w.data_ptr() for w in (*w1, *w2))], dtype=torch.int64)
