"""A fake vendor library that computes: aclnnMegaMoe of one rank, on the CPU, in plain loops.

Its context is a table of the addresses of all ranks' expert tensors, so that one process can be every rank in turn;
a rank's own matrices must be those that it passes. Integer weights lie in tiles (FRACTAL_NZ). What a real operator
refuses (dtypes, shapes, tokens above the maximum, ids out of range, another matrix than [K, N]) is refused here with
the operator's own code.
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
typedef struct { int64_t shape[4], strides[4]; uint64_t dims; int dtype, format; void *data; } aclTensor;
typedef struct { uint64_t size; aclTensor **items; } aclTensorList;
typedef struct { uint64_t size; float *items; } aclFloatArray;
typedef void *aclrtStream; typedef int aclnnStatus;
enum { FLOAT = 0, INT8 = 2, INT32 = 3, INT64 = 9, UINT64 = 10, BF16 = 27, ND = 2, NZ = 29 };
"""

RUNTIME = (
    HANDLES
    + """
int live_handles;
aclTensor *aclCreateTensor(const int64_t *shape, uint64_t dims, int dtype, const int64_t *strides, int64_t offset,
                           int format, const int64_t *storage, uint64_t storage_dims, void *data) {
    aclTensor *t = calloc(1, sizeof *t);
    memcpy(t->shape, shape, dims * sizeof *shape); memcpy(t->strides, strides, dims * sizeof *strides);
    t->dims = dims; t->dtype = dtype; t->format = format; t->data = data; live_handles++;
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
    float clamp; uint16_t *y; int32_t *nums; int bits; const void **beside;
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
/* bits: 16 floats, 8 integers in tiles, 4 eight to a word, likewise */
static int matrices(const aclTensorList *l, int64_t count, int64_t rows, int64_t columns, const int64_t *addresses,
                    int bits) {
    if (!l || (int64_t)l->size != count) return 0;
    for (int64_t e = 0; e < count; e++) {
        const aclTensor *t = l->items[e];
        if (!is(t, bits == 16 ? BF16 : bits == 8 ? INT8 : INT32, 2) || t->format != (bits == 16 ? ND : NZ)) return 0;
        if (t->shape[0] != rows || t->shape[1] != (bits == 4 ? columns / 8 : columns)) return 0;
        if ((int64_t)t->data != addresses[e]) return 0;
    }
    return 1;
}
static int vectors(const aclTensorList *l, int64_t count, int64_t columns, int dtype, const void **own) {
    if (!l || (int64_t)l->size != count) return 0;
    for (int64_t e = 0; e < count; e++) {
        if (!is(l->items[e], dtype, 1) || l->items[e]->shape[0] != columns) return 0;
        own[e] = l->items[e]->data;
    }
    return 1;
}
typedef struct {
    const aclTensorList *w1, *w2, *s1, *s2, *b1, *b2; int64_t mode, dtype;
} Experts;
static aclnnStatus plan(const aclTensor *context, const aclTensor *x, const aclTensor *ids, const aclTensor *weights,
                        Experts own, const aclTensor *mask, int64_t E, int64_t W,
                        int64_t most, const char *activation, float clamp, aclTensor *y, aclTensor *nums,
                        uint64_t *size, aclOpExecutor **executor) {
    const aclTensorList *w1 = own.w1, *w2 = own.w2;
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
    int bits = own.mode == 0 ? 16 : w1->size && w1->items[0]->dtype == INT32 ? 4 : 8;
    if (bits == 16 ? own.s1 || own.s2 || own.dtype != -1 : own.mode != 2 || own.dtype != INT8) return 161002;
    if (bits != 4 && (own.b1 || own.b2)) return 161002;
    if (!matrices(w1, local, H, 2 * I, table + 2 + rank * local, bits)) return 161002;
    if (!matrices(w2, local, I, H, table + 2 + E + rank * local, bits)) return 161002;
    const void **beside = malloc((size_t)(4 * E) * sizeof *beside);  /* s1, s2, b1, b2 of all experts */
    memcpy(beside, table + 2 + 2 * E, (size_t)(4 * E) * sizeof *beside);
    const void **mine = beside + rank * local;
    if (bits != 16 && !(vectors(own.s1, local, 2 * I, UINT64, mine) && vectors(own.s2, local, H, UINT64, mine + E)))
        return 161002;
    if (bits == 4 && !(vectors(own.b1, local, 2 * I, FLOAT, mine + 2 * E) &&
                       vectors(own.b2, local, H, FLOAT, mine + 3 * E))) return 161002;
    Plan *p = malloc(sizeof *p);
    *p = (Plan){T, K, H, I, E, rank * local, local, table, x->data, ids->data, weights->data,
                mask ? mask->data : 0, clamp, y->data, nums->data, bits, beside};
    *size = (uint64_t)(3 * I + 3 * H) * sizeof(float) + (uint64_t)T;  /* grows with the tokens, as real ones do */
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
/* out = row [K] quantised to int8, times a matrix in tiles [N / wide, K, wide] */
static void product(const Plan *p, float *row, int64_t K, int64_t N, const void *w, const void **beside, float *out) {
    const uint64_t *scale = beside[0]; const float *bias = beside[2 * p->E];
    int64_t wide = p->bits == 8 ? 32 : 8, tiles = (p->bits == 8 ? N : N / 8) / wide;
    float most = 0;
    for (int64_t k = 0; k < K; k++) most = fmaxf(most, fabsf(row[k]));
    float s = most / 127;
    for (int64_t k = 0; k < K; k++) row[k] = nearbyintf(row[k] / (s == 0 ? 1 : s)) - (p->bits == 4 ? 8 : 0);
    memset(out, 0, (size_t)N * sizeof *out);
    for (int64_t tile = 0; tile < tiles; tile++)
        for (int64_t k = 0; k < K; k++)
            for (int64_t c = 0, at = (tile * K + k) * wide; c < wide; c++, at++) {
                if (p->bits == 8) { out[tile * wide + c] += row[k] * ((const int8_t *)w)[at]; continue; }
                uint32_t word = ((const uint32_t *)w)[at];
                for (int j = 0; j < 8; j++)
                    out[(tile * wide + c) * 8 + j] += row[k] * (float)((int)(((word >> 4 * j) & 15) ^ 8) - 8);
            }
    for (int64_t n = 0; n < N; n++) {
        uint32_t low = (uint32_t)scale[n]; float f;
        memcpy(&f, &low, 4);
        out[n] = (out[n] * f + (p->bits == 4 ? bias[n] : 0)) * s;
    }
}
static void quantised(const Plan *p, int64_t t, int64_t e, float weight, float *h, float *y, float *more) {
    float *row = more, *out = more + p->H;
    for (int64_t k = 0; k < p->H; k++) row[k] = widen(p->x[t * p->H + k]);
    product(p, row, p->H, 2 * p->I, (const void *)p->table[2 + e], p->beside + e, h);
    for (int64_t i = 0; i < p->I; i++) h[i] = activate(h[i], h[p->I + i], p->clamp);
    product(p, h, p->I, p->H, (const void *)p->table[2 + p->E + e], p->beside + p->E + e, out);
    for (int64_t n = 0; n < p->H; n++) y[n] += weight * out[n];
}
static aclnnStatus run(void *workspace, Plan *p) {
    float *h = workspace, *y = h + 2 * p->I, *more = y + p->H;
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
            if (!computes) continue;
            if (p->bits == 16) expert(p, t, e, p->weights[t * p->K + k], h, y);
            else quantised(p, t, e, p->weights[t * p->K + k], h, y, more);
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
    free(p->beside); free(p);
    return status;
}
"""
FIRST = """
aclnnStatus aclnnMegaMoeGetWorkspaceSize(%s) {
    Experts own = {weight1, weight2, weightScales1Optional, weightScales2Optional, bias1Optional, bias2Optional,
                   dispatchQuantMode, dispatchQuantOutDtype};
    return plan(context, x, topkIds, topkWeights, own, xActiveMaskOptional, moeExpertNum, epWorldSize,
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


def table(rank: int, *tensors: Sequence[Tensor]) -> Tensor:
    """The context of one rank, by address: all experts' matrices, and of quantised ones both scales and both biases."""
    experts = len(tensors[0])
    addresses = [t.data_ptr() for each in tensors for t in each]
    return torch.tensor([rank, experts, *addresses, *[0] * (6 * experts - len(addresses))], dtype=torch.int64)
