/* Devices, memory, streams, events and captured graphs, all of them on the host and synchronous. Written from the public
   interface that torch_npu calls. A kernel is a number: what is enqueued runs at once through the hook that Python sets,
   or is kept while its stream is captured. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef int aclError;
typedef void *handle;
enum { OK = 0, INVALID = 100000, NO_MEMORY = 200000 };

static int32_t device;
static char context;
aclError aclInit(const char *config) { return OK; }
aclError aclFinalize(void) { return OK; }
aclError aclrtSetDevice(int32_t id) { device = id; return OK; }
aclError aclrtResetDevice(int32_t id) { return OK; }
aclError aclrtGetDevice(int32_t *id) { *id = device; return OK; }
aclError aclrtGetDeviceCount(uint32_t *count) { *count = 1; return OK; }
const char *aclrtGetSocName(void) { return "Ascend910_9382"; }
aclError aclrtGetCurrentContext(handle *out) { *out = &context; return OK; }
aclError aclrtSetCurrentContext(handle given) { return OK; }
aclError aclrtSetDeviceSatMode(int mode) { return OK; }
aclError aclrtGetMemInfo(int kind, size_t *free, size_t *total) { *free = *total = (size_t)8 << 30; return OK; }
const char *aclGetRecentErrMsg(void) { return ""; }

aclError aclrtMalloc(handle *out, size_t size, int policy) {
    return posix_memalign(out, 512, size ? size : 512) ? NO_MEMORY : OK;
}
aclError aclrtMallocAlign32(handle *out, size_t size, int policy) { return aclrtMalloc(out, size, policy); }
aclError aclrtFree(handle memory) { free(memory); return OK; }
aclError aclrtMallocHost(handle *out, size_t size) { return aclrtMalloc(out, size, 0); }
aclError aclrtFreeHost(handle memory) { free(memory); return OK; }

/* --- streams and events --- */
typedef struct Graph Graph;
typedef struct { int id; Graph *capture; } Stream;
typedef struct { Graph *capture; } Event;
static int streams;
aclError aclrtCreateStreamWithConfig(handle *out, uint32_t priority, uint32_t flags) {
    Stream *made = calloc(1, sizeof *made);
    made->id = streams++; *out = made;
    return OK;
}
aclError aclrtCreateStream(handle *out) { return aclrtCreateStreamWithConfig(out, 0, 0); }
aclError aclrtDestroyStream(handle stream) { return OK; }
aclError aclrtDestroyStreamForce(handle stream) { return OK; }
aclError aclrtStreamGetId(Stream *stream, int32_t *id) { *id = stream ? stream->id : 0; return OK; }
aclError aclrtSynchronizeStream(handle stream) { return OK; }
aclError aclrtSynchronizeStreamWithTimeout(handle stream, int32_t timeout) { return OK; }
aclError aclrtSynchronizeDevice(void) { return OK; }
aclError aclrtSynchronizeDeviceWithTimeout(int32_t timeout) { return OK; }
aclError aclrtCreateEventExWithFlag(handle *out, uint32_t flag) { *out = calloc(1, sizeof(Event)); return OK; }
aclError aclrtCreateEventWithFlag(handle *out, uint32_t flag) { *out = calloc(1, sizeof(Event)); return OK; }
aclError aclrtCreateEvent(handle *out) { *out = calloc(1, sizeof(Event)); return OK; }
aclError aclrtDestroyEvent(handle event) { free(event); return OK; }
/* A capture follows events: a stream that waits for what a captured stream recorded is captured too. */
aclError aclrtRecordEvent(Event *event, Stream *stream) { event->capture = stream ? stream->capture : 0; return OK; }
aclError aclrtStreamWaitEvent(Stream *stream, Event *event) {
    if (stream && event->capture && !stream->capture) stream->capture = event->capture;
    return OK;
}
aclError aclrtResetEvent(handle event, handle stream) { return OK; }
aclError aclrtQueryEventStatus(handle event, int *status) { *status = 1; return OK; }
aclError aclrtQueryEventWaitStatus(handle event, int *status) { *status = 1; return OK; }
aclError aclrtSynchronizeEvent(handle event) { return OK; }
aclError aclrtEventElapsedTime(float *ms, handle start, handle end) { *ms = 0; return OK; }
aclError aclrtStreamQuery(handle stream, int *status) { *status = 0; return OK; }

/* --- captured graphs --- */
typedef int (*Call)(void *, void *);
typedef struct { int kind; int64_t kernel; void *to; const void *from; size_t size; int value; Call call; } Step;
struct Graph { Step *steps; size_t count, room; int open; };
static void (*hook)(int64_t);
void emulated_set_hook(void (*given)(int64_t)) { hook = given; }
enum { KERNEL, COPY, FILL, CALL };
static aclError step(const Step *s) {
    if (s->kind == CALL) return s->call(s->to, (void *)s->from);
    if (s->kind == KERNEL) hook(s->kernel);
    else if (s->kind == COPY) memmove(s->to, s->from, s->size);
    else memset(s->to, s->value, s->size);
    return OK;
}
static aclError enqueue(Stream *stream, Step s) {
    Graph *g = stream ? stream->capture : 0;
    if (!g || !g->open) return step(&s);
    if (g->count == g->room) g->steps = realloc(g->steps, (g->room = g->room ? 2 * g->room : 64) * sizeof s);
    g->steps[g->count++] = s;
    return OK;
}
aclError emulated_launch(Stream *stream, int64_t kernel) { return enqueue(stream, (Step){KERNEL, kernel}); }
/* For vendor libraries: call(a, b) on a stream. */
aclError emulated_call(Stream *stream, Call call, void *a, void *b) {
    return enqueue(stream, (Step){CALL, 0, a, b, 0, 0, call});
}
aclError aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t size, int kind, Stream *stream) {
    return size > room ? INVALID : enqueue(stream, (Step){COPY, 0, to, from, size});
}
aclError aclrtMemcpy(void *to, size_t room, const void *from, size_t size, int kind) {
    return aclrtMemcpyAsync(to, room, from, size, kind, 0);
}
aclError aclrtMemsetAsync(void *to, size_t room, int32_t value, size_t size, Stream *stream) {
    return size > room ? INVALID : enqueue(stream, (Step){FILL, 0, to, 0, size, value});
}
aclError aclrtMemset(void *to, size_t room, int32_t value, size_t size) {
    return aclrtMemsetAsync(to, room, value, size, 0);
}
aclError aclmdlRICaptureBegin(Stream *stream, int mode) {
    if (stream->capture && stream->capture->open) return INVALID;
    stream->capture = calloc(1, sizeof(Graph)); stream->capture->open = 1;
    return OK;
}
aclError aclmdlRICaptureGetInfo(Stream *stream, int *status, handle *graph) {
    Graph *g = stream ? stream->capture : 0;
    *status = g && g->open;
    *graph = *status ? g : 0;
    return OK;
}
aclError aclmdlRICaptureEnd(Stream *stream, handle *graph) {
    if (!stream->capture || !stream->capture->open) return INVALID;
    stream->capture->open = 0; *graph = stream->capture; stream->capture = 0;
    return OK;
}
aclError aclmdlRICaptureThreadExchangeMode(int *mode) { return OK; }
aclError aclmdlRIExecuteAsync(Graph *graph, Stream *stream) {
    aclError error = OK;
    for (size_t i = 0; i < graph->count && !error; i++) error = step(&graph->steps[i]);
    return error;
}
aclError aclmdlRIDestroy(Graph *graph) { free(graph->steps); free(graph); return OK; }

/* --- what torch_npu sets at its start --- */
aclError aclSetCompileopt(int option, const char *value) { return OK; }
aclError aclrtSetOpExecuteTimeOut(uint32_t seconds) { return OK; }
aclError aclrtSetOpWaitTimeout(uint32_t seconds) { return OK; }
aclError aclrtSetStreamFailureMode(handle stream, uint64_t mode) { return OK; }
aclError aclrtSetStreamOverflowSwitch(handle stream, uint32_t flag) { return OK; }
aclError aclrtSetStreamAttribute(handle stream, int attribute, handle value) { return OK; }
aclError aclrtPeekAtLastError(int level) { return OK; }
aclError aclrtGetLastError(int level) { return OK; }
static const char OPTION[] = "must_keep_origin_dtype";
size_t aclGetCompileoptSize(int option) { return sizeof OPTION; }
aclError aclGetCompileopt(int option, char *value, size_t room) {
    if (room < sizeof OPTION) return INVALID;
    memcpy(value, OPTION, sizeof OPTION);
    return OK;
}
static int64_t parameters[64];
aclError aclrtGetSysParamOpt(int option, int64_t *value) { *value = parameters[option & 63]; return OK; }
aclError aclrtSetSysParamOpt(int option, int64_t value) { parameters[option & 63] = value; return OK; }
aclError aclrtCtxSetSysParamOpt(int option, int64_t value) { return aclrtSetSysParamOpt(option, value); }
aclError aclrtGetStreamResLimit(handle stream, int kind, uint32_t *value) { *value = 24; return OK; }
aclError aclrtGetDeviceResLimit(int32_t id, int kind, uint32_t *value) { *value = 24; return OK; }

/* An operator without a kernel here falls back to this one: refused, so that it is named and never silently nothing. */
aclError aclopCompileAndExecute(const char *type, int inputs, handle input, handle in, int outputs, handle output,
                                handle out, handle attributes, int engine, int flag, const char *path, handle stream) {
    return 100024;
}
