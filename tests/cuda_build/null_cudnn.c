/* cuDNN's graph functions without cuDNN, loaded before libcudnn: every graph is accepted, none computes anything.

cuDNN brings a CUDA runtime of its own, which the null device does not serve, so it cannot be opened there. What torch
asks of it can: null_cudnn_dump writes, in order, each tensor (unique id, dims, strides, whether it is ragged), each
graph, and each execution. Numbers are those of cudnn_graph.h of cuDNN 9. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { HEURISTICS = 4, GRAPH = 15, TENSOR = 17 };                            /* kinds of descriptors */
enum { RESULTS = 202, WORKSPACE = 402, DIMS = 902, STRIDES, UID = 906, VIRTUAL, RAGGED = 913 }; /* attributes */
enum { INT64 = 3, DESCRIPTOR = 15, INT32 = 23, NUMERICAL_NOTE = 11, BEHAVIOUR_NOTE = 19 };      /* their types */

struct descriptor {
  int kind, ragged, is_virtual;
  int64_t uid, dims[4], strides[4];
};
static char *record;
static size_t length;

static void add(const char *line) {
  size_t more = strlen(line);
  record = realloc(record, length + more + 1);
  memcpy(record + length, line, more + 1);
  length += more;
}

void null_cudnn_dump(const char *path) {
  FILE *file = fopen(path, "w");
  if (record) fputs(record, file);
  fclose(file);
  length = 0;
  if (record) record[0] = 0;
}

int cudnnCreate(void **handle) { return *handle = calloc(1, 64), 0; }
int cudnnDestroy(void *handle) { return free(handle), 0; }
int cudnnSetStream(void *handle, void *stream) { return 0; }
int cudnnGetStream(void *handle, void **stream) { return *stream = 0, 0; }
int cudnnBackendInitialize(void *each) { return 0; }

int cudnnBackendCreateDescriptor(int kind, void **made) {
  struct descriptor *each = calloc(1, sizeof *each);
  each->kind = kind;
  return *made = each, 0;
}

int cudnnBackendDestroyDescriptor(void *each) { return free(each), 0; }

int cudnnBackendSetAttribute(struct descriptor *each, int name, int type, int64_t count, const void *values) {
  if (each->kind != TENSOR) return 0;
  if (name == UID) each->uid = *(int64_t *)values;
  if (name == VIRTUAL) each->is_virtual = *(char *)values;
  if (name == RAGGED) each->ragged = 1;
  if ((name == DIMS || name == STRIDES) && count == 4)
    memcpy(name == DIMS ? each->dims : each->strides, values, 4 * sizeof(int64_t));
  return 0;
}

int cudnnBackendFinalize(struct descriptor *each) {
  char line[256];
  int64_t *d = each->dims, *s = each->strides;
  if (each->kind == GRAPH) add("graph\n");
  if (each->kind != TENSOR || each->is_virtual) return 0;
  snprintf(line, sizeof line, "tensor %ld %ld,%ld,%ld,%ld %ld,%ld,%ld,%ld %d\n", each->uid, d[0], d[1], d[2], d[3], s[0],
           s[1], s[2], s[3], each->ragged);
  return add(line), 0;
}

int cudnnBackendGetAttribute(struct descriptor *each, int name, int type, int64_t room, int64_t *count, void *values) {
  int notes = type == NUMERICAL_NOTE || type == BEHAVIOUR_NOTE;
  if (count) *count = notes ? 0 : 1; /* one plan, without notes */
  if (values && room > 0 && type == INT64) *(int64_t *)values = name == WORKSPACE ? 1024 : 0;
  if (values && room > 0 && type == INT32) *(int32_t *)values = 0;
  return 0;
}

int cudnnBackendExecute(void *handle, void *plan, void *pack) { return add("execute\n"), 0; }
