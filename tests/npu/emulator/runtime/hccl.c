/* Communication between processes: each collective becomes a step of its stream, which Python runs over gloo. Written
   from the public interface that torch_npu calls. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

typedef int HcclResult;
typedef struct { int64_t id; uint32_t world, rank; char name[64]; } Comm;
/* counts: of an uneven exchange, per rank: sent, where from, received, where to (in elements) */
typedef struct {
    int64_t kind, comm, send, recv, count, dtype, more; int64_t *counts[4];
} Collective;
enum { ALL_REDUCE, BROADCAST, REDUCE_SCATTER, ALL_GATHER, ALL_TO_ALL };
static int64_t (*join)(const char *, int64_t, int64_t);
static int (*run)(const Collective *);
void emulated_set_collectives(int64_t (*j)(const char *, int64_t, int64_t), int (*r)(const Collective *)) { join = j; run = r; }
int emulated_call(void *stream, int (*call)(void *, void *), void *a, void *b);
static int step(void *collective, void *unused) { return run(collective); }

HcclResult HcclGetRootInfo(char *info) {
    static int made;
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    snprintf(info, 64, "emulated_%d_%d_%ld", getpid(), made++, now.tv_nsec);
    return 0;
}
HcclResult HcclCommInitRootInfo(uint32_t world, const char *info, uint32_t rank, Comm **out) {
    if (!join) return 4;
    Comm *made = calloc(1, sizeof *made);
    snprintf(made->name, sizeof made->name, "%.60s", info);
    made->world = world; made->rank = rank; made->id = join(made->name, world, rank);
    *out = made;
    return made->id < 0 ? 4 : 0;
}
HcclResult HcclCommInitRootInfoConfig(uint32_t world, const char *info, uint32_t rank, const void *config, Comm **out) {
    return HcclCommInitRootInfo(world, info, rank, out);
}
HcclResult HcclCommDestroy(Comm *comm) { return 0; }
HcclResult HcclGetCommName(Comm *comm, char *name) { strcpy(name, comm->name); return 0; }
HcclResult HcclGetCommAsyncError(Comm *comm, HcclResult *error) { *error = 0; return 0; }
const char *HcclGetErrorString(HcclResult code) { return code ? "emulated HCCL" : ""; }
uint32_t HcclGetCommConfigCapability(void) { return 0; }

static HcclResult enqueue(Collective given, void *stream) {
    Collective *kept = malloc(sizeof *kept);  /* a captured graph runs it again and again */
    *kept = given;
    return emulated_call(stream, step, kept, 0);
}
HcclResult HcclAllReduce(void *send, void *recv, uint64_t count, int dtype, int op, Comm *comm, void *stream) {
    return enqueue((Collective){ALL_REDUCE, comm->id, (int64_t)send, (int64_t)recv, count, dtype, op}, stream);
}
HcclResult HcclBroadcast(void *buffer, uint64_t count, int dtype, uint32_t root, Comm *comm, void *stream) {
    return enqueue((Collective){BROADCAST, comm->id, (int64_t)buffer, (int64_t)buffer, count, dtype, root}, stream);
}
HcclResult HcclReduceScatter(void *send, void *recv, uint64_t count, int dtype, int op, Comm *comm, void *stream) {
    return enqueue((Collective){REDUCE_SCATTER, comm->id, (int64_t)send, (int64_t)recv, count, dtype, op}, stream);
}
HcclResult HcclAllGather(void *send, void *recv, uint64_t count, int dtype, Comm *comm, void *stream) {
    return enqueue((Collective){ALL_GATHER, comm->id, (int64_t)send, (int64_t)recv, count, dtype}, stream);
}
HcclResult HcclAlltoAllV(const void *send, const uint64_t *counts, const uint64_t *from, int dtype, const void *recv,
                         const uint64_t *received, const uint64_t *to, int other, Comm *comm, void *stream) {
    Collective made = {ALL_TO_ALL, comm->id, (int64_t)send, (int64_t)recv, 0, dtype};
    const uint64_t *given[] = {counts, from, received, to};
    for (int i = 0; i < 4; i++) {
        made.counts[i] = malloc(comm->world * sizeof **made.counts);
        memcpy(made.counts[i], given[i], comm->world * sizeof **made.counts);
    }
    return enqueue(made, stream);
}
HcclResult HcclAlltoAll(const void *send, uint64_t count, int dtype, const void *recv, uint64_t received, int other,
                        Comm *comm, void *stream) {
    uint64_t counts[comm->world], displacements[comm->world];
    for (uint32_t r = 0; r < comm->world; r++) { counts[r] = count; displacements[r] = r * count; }
    return HcclAlltoAllV(send, counts, displacements, dtype, recv, counts, displacements, other, comm, stream);
}
