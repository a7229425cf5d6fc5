/* NCCL among real processes, for null_device.c, which includes this file. Nothing is sent but what the host knows.
 *
 * The ranks of a run share the file NULL_NCCL; without it a process is alone, and what the others would do is what it
 * does. NCCL's rules hold: one GPU a rank, memory and streams of the communicator's GPU, the same calls in the same
 * order with the same sizes on all ranks. A call that breaks a rule ends its process with what it was (exit code 97). A
 * collective ends when all ranks have come to it, so what waits for one that never comes hangs; after
 * NULL_NCCL_PATIENCE seconds (120) that is told as a fault, and the wait goes on.
 *
 * Two ranks on one GPU of one host are refused. A host is its name, or NCCL_HOSTID where that is set; from NCCL 2.30 on
 * NCCL_MULTI_RANK_GPU_ENABLE=1 allows it. The version that NCCL says it has is NULL_NCCL_VERSION, as ncclGetVersion writes it.
 *
 * A rank has come to a collective when its host has asked for it; on a device that works by itself (NULL_DEVICE_WORKS,
 * see null_device.c), when its device has. Of small messages the bytes that came from the host are carried: sums,
 * broadcasts and gathers of them are what they would be, and every other byte is zero.
 */
enum { MOST_RANKS = 16, MOST_COMMS = 64, RING = 256, SMALL = 512, PAIR_RING = 64 };

typedef struct {
  volatile unsigned long number; /* of the call, from 1 */
  char what[96];                 /* name, type, count, operation and root: equal on all ranks */
  int mine[4];                   /* what a rank says for itself */
  unsigned size;
  char data[SMALL], known[SMALL];
} Post;
typedef struct {
  volatile unsigned long posted, arrived, read;
  volatile int here, device;
  volatile unsigned long host;
  Post ring[RING];
} Member;
/* one end of what one rank sends to another: how many messages its host and its device have come to, and their bytes */
typedef struct {
  volatile unsigned long posted, arrived;
  size_t bytes[PAIR_RING];
} End;
typedef struct {
  char id[NCCL_UNIQUE_ID_BYTES];
  int used;
  volatile unsigned long ends_at; /* the call from which on none is met; 0: all are */
  Member member[MOST_RANKS];
  End sends[MOST_RANKS][MOST_RANKS], receives[MOST_RANKS][MOST_RANKS]; /* [from][to] */
} Meeting;
typedef struct {
  volatile int lock;
  Meeting meeting[MOST_COMMS];
} Shared;
typedef struct {
  int n, rank, device;
  unsigned long calls;
  Meeting *meeting; /* 0 where the process is alone */
} Comm;
/* one message of a group of sends and receives */
typedef struct {
  int receives, peer;
  unsigned long number; /* among those of the pair, from 1 */
  size_t bytes;
} Message;
struct Call {
  Comm *comm;
  Message *messages; /* of an EXCHANGE */
  int num_messages;
  unsigned long number;
  char what[96];
  int kind, root, told, met, refs;
  ncclDataType_t type;
  ncclRedOp_t how;
  size_t count, size; /* of what comes out, in bytes */
  char *result;       /* what is known of that, once the call is met */
};
enum { ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, BROADCAST, REDUCE, ALL_TO_ALL, SPLIT, EXCHANGE };

static volatile int aborted, nccl_error;
void null_device_nccl_error(int e) { nccl_error = e; } /* for ncclCommGetAsyncError */
static __thread char nccl_words[256];

static Shared *shared(void) {
  static Shared *at;
  static int looked;
  LOCK;
  if (!looked) {
    char *path = getenv("NULL_NCCL");
    int file = path ? open(path, O_RDWR | O_CREAT, 0600) : -1;
    if (file >= 0 && !ftruncate(file, sizeof(Shared)))
      at = mmap(0, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    looked = 1;
  }
  UNLOCK;
  return at == MAP_FAILED ? 0 : at;
}
static double patience(void) {
  char *e = getenv("NULL_NCCL_PATIENCE");
  return e ? atof(e) : 120;
}
static Meeting *meeting_of(const char *id) {
  Shared *s = shared();
  if (!s)
    return 0;
  while (__sync_lock_test_and_set(&s->lock, 1))
    usleep(50);
  Meeting *found = 0;
  for (int i = 0; i < MOST_COMMS && !found; i++)
    if (!s->meeting[i].used || !memcmp(s->meeting[i].id, id, sizeof s->meeting[i].id))
      found = &s->meeting[i];
  if (found && !found->used) {
    memcpy(found->id, id, sizeof found->id);
    found->used = 1;
  }
  __sync_lock_release(&s->lock);
  return found;
}
static void against_rules(Comm *c, const char *f, ...) {
  char b[512];
  va_list a;
  va_start(a, f);
  vsnprintf(b, sizeof b, f, a);
  va_end(a);
  fault("NCCL: rank %d of %d on GPU %d: %s", c->rank, c->n, c->device, b);
  _exit(97);
}

#include "null_faults.c"

static int version(void) {
  char *e = getenv("NULL_NCCL_VERSION");
  return e ? atoi(e) : 22809;
}
/* which host a rank says it is on, as NCCL's getHostHash */
static unsigned long host(void) {
  char name[256] = "", *given = getenv("NCCL_HOSTID");
  if (!given && !gethostname(name, sizeof name - 1))
    given = name;
  return sum_of(given, strlen(given));
}
static int shares_gpus(void) {
  char *e = getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  return e && atoi(e) == 1 && version() >= 23000;
}

/* until all ranks of a communicator are there, as ncclCommInitRank waits: for ever */
static ncclResult_t meet(ncclComm_t *out, int n, const char *id, int rank) {
  Comm *c = calloc(1, sizeof *c);
  *c = (Comm){n, rank, physical(current), 0, n > 1 ? meeting_of(id) : 0};
  *out = (ncclComm_t)c;
  touch("ncclCommInitRank");
  notef(n, "ncclCommInit");
  while (n > 1 && fault_is("unconnected"))
    pause();
  if (!c->meeting)
    return ncclSuccess;
  if (n > MOST_RANKS)
    against_rules(c, "the null NCCL knows at most %d ranks", MOST_RANKS);
  char *unreachable = getenv("NULL_NCCL_UNREACHABLE"); /* the rank whose machine cannot be connected to */
  if (unreachable && atoi(unreachable) == rank) {
    snprintf(nccl_words, sizeof nccl_words, "socketPollConnect: connect to 10.1.0.7<43211> returned No route to host");
    return ncclSystemError;
  }
  Member *m = c->meeting->member;
  m[rank].device = c->device;
  m[rank].host = host();
  __sync_synchronize();
  m[rank].here = 1;
  double began = seconds();
  for (int r = 0, told = 0; r < n;) {
    if (m[r].here) {
      r++;
      continue;
    }
    usleep(200);
    if (!told && seconds() - began > patience()) {
      fault("NCCL: rank %d of %d waits in ncclCommInitRank for rank %d", rank, n, r);
      told = 1;
    }
  }
  for (int r = 0; r < n; r++)
    if (r != rank && m[r].device == c->device && m[r].host == m[rank].host && !shares_gpus()) {
      snprintf(nccl_words, sizeof nccl_words, "Duplicate GPU detected : rank %d and rank %d both on CUDA device %x000",
               rank, r, c->device + 1);
      fault("NCCL: %s", nccl_words);
      return ncclInvalidUsage;
    }
  return ncclSuccess;
}

static size_t width(ncclDataType_t t) {
  static const int w[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return w[t];
}
static char *result_of(Call *c) { return c->result; }
static void hold(Call *c) {
  LOCK;
  c->refs++;
  UNLOCK;
}
static void release(Call *c) {
  LOCK;
  if (!--c->refs) {
    free(c->result);
    free(c->messages);
    free(c);
  }
  UNLOCK;
}
/* with the lock held: the element of a result that all ranks know their part of */
static void add_up(Call *c, Post **posts) {
  size_t w = width(c->type);
  for (size_t i = 0; i + w <= c->size; i += w) {
    double sum = 0;
    long whole = 0;
    int known = c->how == ncclSum;
    for (int r = 0; r < c->comm->n; r++) {
      const char *at = posts[r]->data + i;
      if (c->type == ncclFloat64 && posts[r]->known[i] && *(double *)at != *(double *)at) {
        sum = *(double *)at; /* whatever the others' are */
        known = 1;
        break;
      }
      for (size_t b = 0; b < w; b++)
        known &= posts[r]->known[i + b];
      switch (c->type) {
      case ncclFloat64: sum += *(double *)at; break;
      case ncclFloat32: sum += *(float *)at; break;
      case ncclInt64: whole += *(long *)at; break;
      case ncclInt32: whole += *(int *)at; break;
      default: known = 0;
      }
    }
    char *to = c->result + i;
    if (!known)
      continue;
    switch (c->type) {
    case ncclFloat64: *(double *)to = sum; break;
    case ncclFloat32: *(float *)to = sum; break;
    case ncclInt64: *(long *)to = whole; break;
    default: *(int *)to = whole;
    }
  }
}
static void take_known(char *to, Post *p, size_t n) {
  for (size_t i = 0; i < n && i < p->size; i++)
    if (p->known[i])
      to[i] = p->data[i];
}
/* with the lock held: whether the other end of each message of a group is there */
static int exchange_met(Call *c) {
  Comm *comm = c->comm;
  Meeting *m = comm->meeting;
  for (int i = 0; i < c->num_messages; i++) { /* first: this rank's device has come to all of them */
    Message *one = &c->messages[i];
    End *own = one->receives ? &m->receives[one->peer][comm->rank] : &m->sends[comm->rank][one->peer];
    if (own->arrived < one->number)
      own->arrived = one->number;
  }
  for (int i = 0; i < c->num_messages; i++) {
    Message *one = &c->messages[i];
    End *other = one->receives ? &m->sends[one->peer][comm->rank] : &m->receives[comm->rank][one->peer];
    if ((works() ? other->arrived : other->posted) < one->number) {
      unmet = c;
      unmet_rank = one->peer;
      return 0;
    }
    size_t theirs = other->bytes[one->number % PAIR_RING];
    if (theirs != one->bytes)
      against_rules(comm, "message %lu %s rank %d has %zu bytes here and %zu there", one->number,
                    one->receives ? "from" : "to", one->peer, one->bytes, theirs);
  }
  c->met = 1;
  return 1;
}
/* with the lock held: whether all ranks have come to a call; the first time its result is put together */
static int call_met(Call *c) {
  Comm *comm = c->comm;
  Meeting *m = comm->meeting;
  if (c->met || aborted || !m)
    return 1;
  if (c->kind == EXCHANGE)
    return exchange_met(c);
  Member *me = &m->member[comm->rank];
  if (me->arrived < c->number)
    me->arrived = c->number;
  if (m->ends_at && c->number >= m->ends_at)
    return 0;
  Post *posts[MOST_RANKS];
  for (int r = 0; r < comm->n; r++) {
    Member *other = &m->member[r];
    if ((works() ? other->arrived : other->posted) < c->number) {
      unmet = c;
      unmet_rank = r;
      return 0;
    }
    posts[r] = &other->ring[c->number % RING];
  }
  for (int r = 0; r < comm->n; r++)
    if (strcmp(posts[r]->what, c->what))
      against_rules(comm, "call %lu is %s here and %s on rank %d", c->number, c->what, posts[r]->what, r);
  if (c->size && c->size <= SMALL) {
    c->result = calloc(1, c->size);
    if (c->kind == ALL_REDUCE)
      add_up(c, posts);
    if (c->kind == BROADCAST)
      take_known(c->result, posts[c->root], c->size);
    if (c->kind == ALL_GATHER)
      for (int r = 0; r < comm->n; r++)
        take_known(c->result + c->size / comm->n * r, posts[r], c->size / comm->n);
  }
  c->met = 1;
  if (me->read < c->number)
    me->read = c->number;
  return 1;
}
/* what was waited for, and for whom */
static void tell_unmet(void) {
  Call *c = unmet;
  if (!c || c->told)
    return;
  c->told = 1;
  fault("NCCL: rank %d of %d waits in call %lu, %s, for rank %d, which has not come to it", c->comm->rank, c->comm->n,
        c->number, c->what, unmet_rank);
}
/* write a call where the others see it; a rank cannot be further ahead than the ring is long */
static void post(Call *c, const void *send, size_t size, const int *mine) {
  Comm *comm = c->comm;
  if (!comm->meeting)
    return;
  Member *m = comm->meeting->member, *me = &m[comm->rank];
  for (int r = 0; r < comm->n; r++)
    while (m[r].read + RING <= c->number && !aborted) {
      LOCK;
      reach_all();
      UNLOCK;
      usleep(100);
    }
  Post *p = &me->ring[c->number % RING];
  strcpy(p->what, c->what);
  memset(p->known, 0, SMALL);
  p->size = size <= SMALL ? size : 0;
  if (p->size && send)
    overlay(send, p->size, p->data, p->known);
  if (p->size && nan_next) {
    *(double *)p->data = __builtin_nan("");
    memset(p->known, 1, sizeof(double));
    nan_next = 0;
  }
  if (mine)
    memcpy(p->mine, mine, sizeof p->mine);
  p->number = c->number;
  __sync_synchronize();
  me->posted = c->number;
}
static void of_its_device(Comm *c, const void *p, const char *which, const char *what) {
  int on = device_of(p);
  if (on != c->device && on >= 0)
    against_rules(c, "%s has its %s on GPU %d", what, which, on);
  if (on < 0)
    against_rules(c, "%s has its %s in memory that is on no GPU", what, which);
}
static void on_its_gpu(Comm *c, Stream *s, const char *what) {
  if (s->device >= 0 && s->device != c->device)
    against_rules(c, "%s is on a stream of GPU %d", what, s->device);
  if (s->device < 0 && physical(current) != c->device)
    against_rules(c, "%s is called with GPU %d current", what, physical(current));
}
static const char *KINDS[] = {"allReduce", "allGather", "reduceScatter", "broadcast", "reduce", "allToAll"};
static ncclResult_t collective(int kind, const void *send, void *recv, size_t n, ncclDataType_t t, int how, int root,
                               ncclComm_t on, cudaStream_t stream) {
  Comm *comm = (Comm *)on;
  Stream *s = st(stream);
  touch(KINDS[kind]);
  fault_in_collective(comm, send, n, t);
  Call *c = calloc(1, sizeof *c);
  *c = (Call){.comm = comm, .number = ++comm->calls, .kind = kind, .root = root, .refs = 1, .type = t, .how = how,
              .count = n};
  snprintf(c->what, sizeof c->what, "%s of %zu elements of %zu bytes, operation %d, root %d", KINDS[kind], n, width(t),
           how, root);
  if (send)
    of_its_device(comm, send, "input", c->what);
  if (recv)
    of_its_device(comm, recv, "output", c->what);
  on_its_gpu(comm, s, c->what);
  size_t out = n * width(t) * (kind == ALL_GATHER ? comm->n : 1);
  c->size = kind == REDUCE_SCATTER || kind == REDUCE || kind == ALL_TO_ALL ? 0 : out;
  post(c, send, n * width(t), 0);
  wait_for_room(s);
  LOCK; /* the device may not come by before the call is there */
  s->asked++;
  mark(s, CALL, 0, 0, c);
  if (comm->meeting && c->size && c->size <= SMALL)
    learn_call(recv, c->size, c);
  UNLOCK;
  if (hangs_next)
    null_device_hang();
  hangs_next = 0;
  notef((double)n * width(t), "nccl %s of %d", KINDS[kind], comm->n);
  return ncclSuccess;
}

/* sends and receives of a group, which begin together with its end */
static __thread struct {
  int depth;
  Call *open; /* of one communicator and stream */
  Stream *on;
} group;
static void end_exchange(void) {
  Call *c = group.open;
  Stream *s = group.on;
  group.open = 0;
  if (!c)
    return;
  Meeting *m = c->comm->meeting;
  double bytes = 0;
  for (int i = 0; i < c->num_messages; i++) {
    Message *one = &c->messages[i];
    bytes += one->receives ? 0 : one->bytes;
    if (!m)
      continue;
    End *own = one->receives ? &m->receives[one->peer][c->comm->rank] : &m->sends[c->comm->rank][one->peer];
    own->bytes[one->number % PAIR_RING] = one->bytes;
    __sync_synchronize();
    own->posted = one->number;
  }
  wait_for_room(s);
  LOCK;
  s->asked++;
  mark(s, CALL, 0, 0, c);
  UNLOCK;
  notef(bytes, "nccl exchange of %d", c->comm->n);
}
static ncclResult_t message(int receives, const void *at, size_t n, ncclDataType_t t, int peer, ncclComm_t on,
                            cudaStream_t stream) {
  Comm *comm = (Comm *)on;
  Stream *s = st(stream);
  const char *what = receives ? "recv" : "send";
  touch(what);
  if (n)
    of_its_device(comm, at, receives ? "output" : "input", what);
  on_its_gpu(comm, s, what);
  if (group.open && (group.open->comm != comm || group.on != s))
    end_exchange();
  if (!group.open) {
    fault_in_collective(comm, 0, n, t);
    group.open = calloc(1, sizeof *group.open);
    *group.open = (Call){.comm = comm, .kind = EXCHANGE, .refs = 1, .what = "sends and receives"};
    group.on = s;
  }
  Call *c = group.open;
  Meeting *m = comm->meeting;
  unsigned long before = 0; /* posted, and in this group */
  for (int i = 0; i < c->num_messages; i++)
    before += c->messages[i].receives == receives && c->messages[i].peer == peer;
  if (m)
    before += receives ? m->receives[peer][comm->rank].posted : m->sends[comm->rank][peer].posted;
  c->messages = realloc(c->messages, (c->num_messages + 1) * sizeof *c->messages);
  c->messages[c->num_messages++] = (Message){receives, peer, before + 1, n * width(t)};
  if (!group.depth)
    end_exchange();
  return ncclSuccess;
}

ncclResult_t ncclGetVersion(int *v) {
  *v = version();
  return ncclSuccess;
}
ncclResult_t ncclGetUniqueId(ncclUniqueId *u) {
  memset(u, 1, sizeof *u);
  int random = open("/dev/urandom", O_RDONLY);
  if (read(random, u, sizeof *u) < 0)
    memset(u, 1, sizeof *u);
  close(random);
  return ncclSuccess;
}
ncclResult_t ncclCommInitRank(ncclComm_t *c, int n, ncclUniqueId u, int r) { return meet(c, n, u.internal, r); }
ncclResult_t ncclCommInitRankConfig(ncclComm_t *c, int n, ncclUniqueId u, int r, ncclConfig_t *f) {
  return meet(c, n, u.internal, r);
}
ncclResult_t ncclCommInitRankScalable(ncclComm_t *c, int n, int r, int k, ncclUniqueId *u, ncclConfig_t *f) {
  return meet(c, n, u->internal, r);
}
ncclResult_t ncclCommInitAll(ncclComm_t *c, int n, const int *d) {
  for (int i = 0; i < n; i++) {
    Comm *m = calloc(1, sizeof *m);
    *m = (Comm){n, i, physical(d ? d[i] : i)};
    c[i] = (ncclComm_t)m;
  }
  return ncclSuccess;
}
ncclResult_t ncclCommSplit(ncclComm_t on, int color, int key, ncclComm_t *out, ncclConfig_t *f) {
  Comm *comm = (Comm *)on;
  *out = 0;
  if (!comm->meeting) { /* alone: as many as there are */
    Comm *m = malloc(sizeof *m);
    *m = *comm;
    *out = (ncclComm_t)m;
    return ncclSuccess;
  }
  Call c = {.comm = comm, .number = ++comm->calls, .what = "split", .kind = SPLIT, .refs = 1};
  int mine[4] = {color, key};
  post(&c, 0, 0, mine);
  double began = seconds();
  for (int met = 0; !met;) {
    LOCK;
    comm->meeting->member[comm->rank].arrived = c.number;
    met = call_met(&c);
    if (!met && seconds() - began > patience())
      tell_unmet();
    UNLOCK;
    if (!met)
      usleep(200);
  }
  if (color == NCCL_SPLIT_NOCOLOR)
    return ncclSuccess;
  int n = 0, rank = 0;
  for (int r = 0; r < comm->n; r++) {
    Post *p = &comm->meeting->member[r].ring[c.number % RING];
    if (p->mine[0] != color)
      continue;
    n++;
    rank += p->mine[1] < key || (p->mine[1] == key && r < comm->rank);
  }
  char id[NCCL_UNIQUE_ID_BYTES];
  memcpy(id, comm->meeting->id, sizeof id);
  for (int i = 0; i < 4; i++) /* the same for all of a color, and no other's */
    ((unsigned *)id)[i] = ((unsigned *)id)[i] * 2654435761u + (unsigned)c.number * 40503u + (unsigned)color * 2246822519u;
  return meet(out, n, id, rank);
}
ncclResult_t ncclCommDestroy(ncclComm_t c) { return ncclSuccess; }
ncclResult_t ncclCommAbort(ncclComm_t c) {
  aborted = 1;
  return ncclSuccess;
}
ncclResult_t ncclCommFinalize(ncclComm_t c) {
  finish_all();
  return ncclSuccess;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t c, ncclResult_t *e) {
  *e = nccl_error;
  return ncclSuccess;
}
ncclResult_t ncclCommCount(const ncclComm_t c, int *n) {
  *n = ((Comm *)c)->n;
  return ncclSuccess;
}
ncclResult_t ncclCommUserRank(const ncclComm_t c, int *n) {
  *n = ((Comm *)c)->rank;
  return ncclSuccess;
}
ncclResult_t ncclCommRegister(const ncclComm_t c, void *b, size_t n, void **h) {
  *h = b;
  return ncclSuccess;
}
ncclResult_t ncclCommDeregister(const ncclComm_t c, void *h) { return ncclSuccess; }
const char *ncclGetErrorString(ncclResult_t r) {
  return r == ncclSuccess         ? "no error"
         : r == ncclInvalidUsage ? "invalid usage"
         : r == ncclSystemError  ? "unhandled system error (run with NCCL_DEBUG=INFO for details)"
                                 : "remote process exited or there was a network error";
}
const char *ncclGetLastError(ncclComm_t c) { return nccl_words; }
ncclResult_t ncclGroupStart(void) {
  group.depth++;
  return ncclSuccess;
}
ncclResult_t ncclGroupEnd(void) {
  if (!--group.depth)
    end_exchange();
  return ncclSuccess;
}
ncclResult_t ncclSend(const void *at, size_t n, ncclDataType_t t, int peer, ncclComm_t c, cudaStream_t on) {
  return message(0, at, n, t, peer, c, on);
}
ncclResult_t ncclRecv(void *at, size_t n, ncclDataType_t t, int peer, ncclComm_t c, cudaStream_t on) {
  return message(1, at, n, t, peer, c, on);
}
ncclResult_t ncclAlltoAll(const void *s, void *r, size_t n, ncclDataType_t t, ncclComm_t c, cudaStream_t on) {
  return collective(ALL_TO_ALL, s, r, n, t, 0, 0, c, on);
}
ncclResult_t ncclAllReduce(const void *s, void *r, size_t n, ncclDataType_t t, ncclRedOp_t o, ncclComm_t c,
                           cudaStream_t on) {
  return collective(ALL_REDUCE, s, r, n, t, o, 0, c, on);
}
ncclResult_t ncclAllGather(const void *s, void *r, size_t n, ncclDataType_t t, ncclComm_t c, cudaStream_t on) {
  return collective(ALL_GATHER, s, r, n, t, 0, 0, c, on);
}
ncclResult_t ncclReduceScatter(const void *s, void *r, size_t n, ncclDataType_t t, ncclRedOp_t o, ncclComm_t c,
                               cudaStream_t on) {
  return collective(REDUCE_SCATTER, s, r, n, t, o, 0, c, on);
}
ncclResult_t ncclBroadcast(const void *s, void *r, size_t n, ncclDataType_t t, int root, ncclComm_t c,
                           cudaStream_t on) {
  return collective(BROADCAST, s, r, n, t, 0, root, c, on);
}
ncclResult_t ncclBcast(void *r, size_t n, ncclDataType_t t, int root, ncclComm_t c, cudaStream_t on) {
  return collective(BROADCAST, r, r, n, t, 0, root, c, on);
}
ncclResult_t ncclReduce(const void *s, void *r, size_t n, ncclDataType_t t, ncclRedOp_t o, int root, ncclComm_t c,
                        cudaStream_t on) {
  return collective(REDUCE, s, ((Comm *)c)->rank == root ? r : 0, n, t, o, root, c, on);
}
ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t *o, void *s, ncclDataType_t t, ncclScalarResidence_t r,
                                      ncclComm_t c) {
  *o = ncclNumOps; /* a sum of its own kind: its result is not put together here */
  return ncclSuccess;
}
ncclResult_t ncclRedOpDestroy(ncclRedOp_t o, ncclComm_t c) { return ncclSuccess; }
