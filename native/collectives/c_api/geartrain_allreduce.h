/* All-reduce for programs in C, and whatever can call C: one header, one shared library (libgeartrain_allreduce.so).
 *
 * The program brings the ranks together with what it has, MPI for instance; from then on the library moves the bytes
 * over connections and a thread of its own:
 *
 *   gt_options options = {.rank = rank, .world = world, .host = "0.0.0.0"};
 *   gt_group* group;
 *   char mine[GT_ADDRESS_BYTES], *all = malloc(world * GT_ADDRESS_BYTES);
 *   if (gt_group_listen(&options, &group, mine) != GT_OK) die(gt_last_error());
 *   MPI_Allgather(mine, GT_ADDRESS_BYTES, MPI_CHAR, all, GT_ADDRESS_BYTES, MPI_CHAR, MPI_COMM_WORLD);
 *   if (gt_group_connect(group, all, 60.0) != GT_OK) die(gt_last_error());
 *   if (gt_allreduce(group, gradient, count, GT_FLOAT32, GT_SUM, 60.0) != GT_OK) die(gt_last_error());
 *   gt_group_close(group, 10.0);
 *
 * Numbers are added up in the order of the ranks: the same bits on every rank, every time. All ranks call the same
 * things in the same order. Any thread may call. Nothing waits without a deadline; timeouts are in seconds.
 *
 * Addresses hold a key that lets its holder into the group: exchange them on channels that you trust. With a secret
 * they hold none, and every rank and reducer must know the secret. Nothing is encrypted.
 *
 * Compatible within one GT_ABI_VERSION: structures only grow at their end, and `bytes` is the size that the caller was
 * compiled with.
 */
#ifndef GEARTRAIN_ALLREDUCE_H
#define GEARTRAIN_ALLREDUCE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#if defined(__GNUC__)
#pragma GCC visibility push(default)
#endif

#define GT_ABI_VERSION 1
#define GT_ADDRESS_BYTES 512

typedef struct gt_group gt_group;
typedef struct gt_work gt_work;

typedef enum gt_dtype {
  GT_FLOAT32 = 0,
  GT_FLOAT64,
  GT_BFLOAT16,
  GT_FLOAT16,
  GT_INT8,
  GT_INT16,
  GT_INT32,
  GT_INT64,
  GT_UINT8,
  GT_BOOL, /* one byte each */
  GT_UINT16,
  GT_UINT32,
  GT_UINT64,
  GT_COMPLEX64, /* pairs of GT_FLOAT32 */
  GT_COMPLEX128
} gt_dtype;

/* Sums are there of all types (of bool: "or"), averages of floating point and complex ones, the operations on bits of
 * integers and bool, the others of all but complex ones. */
typedef enum gt_op { GT_SUM = 0, GT_AVG, GT_MIN, GT_MAX, GT_PRODUCT, GT_BAND, GT_BOR, GT_BXOR } gt_op;

/* Result of a call. gt_last_error() has the text: the member, the operation and the reason. */
typedef enum gt_status {
  GT_OK = 0,
  GT_RANK_LOST,    /* a rank died, hung up or left */
  GT_REDUCER_LOST, /* a reducer died, hung up or left */
  GT_TIMED_OUT,    /* not over in time: the text names the ranks that are behind */
  GT_DISAGREE,     /* ranks asked for different things */
  GT_PROTOCOL,     /* malformed input from a member */
  GT_CLOSED,       /* the group was closed or aborted */
  GT_INVALID,      /* an invalid argument */
  GT_UNTRUSTED,    /* another secret, or none */
  GT_UNREACHABLE,  /* no listener at the address */
  GT_SYSTEM        /* memory, descriptors, and the like */
} gt_status;

/* Set the whole to zero first, and `bytes` to its size. */
typedef struct gt_options {
  uint32_t bytes; /* sizeof(gt_options); 0: it ends with tcp_only */
  uint32_t rank, world;
  const char* name;            /* of the group; "default" when NULL */
  const char* host;            /* to listen on; "127.0.0.1" when NULL, "0.0.0.0" for every interface */
  const char* secret;          /* NULL: a key in the address */
  const char* const* reducers; /* host:port of each */
  uint32_t reducer_count;
  uint32_t ring;        /* 1: the ring instead of shares; no reducers then */
  const double* shares; /* world + reducer_count of them, 1 in all; NULL: the best for `rates` */
  const double* rates;  /* bytes/s of every rank's and reducer's link; NULL: equal, one link an address */
  uint32_t tcp_only;    /* 1: no shared memory between ranks of one host */
  /* From here on only where `bytes` says that they are there; before they came, structures had no more than the above.
   */
  uint32_t outlives_reducers; /* 1: the group goes on without a reducer that is lost, with the same sums: see below */
  double reducer_silence_s;   /* then: when one that is waited for and says nothing is given up; 0: after 3 seconds */
} gt_options;

/* Groups that outlive reducers. Where a reducer is lost the ranks finish the operations in progress, and all others, in
 * its place, from what they hold: no call fails for it, and results have the same bits. Once it, or another process at
 * its address, is back it has its share again. All ranks have to ask for it. It costs a copy of each result, memory for
 * one window of them for each reducer, and connections between all ranks. gt_group_event tells what has happened. */

/* Listens, and writes the address for the other ranks, padded with zeros. */
gt_status gt_group_listen(const gt_options* options, gt_group** group, char address[GT_ADDRESS_BYTES]);

/* With the addresses of all ranks, GT_ADDRESS_BYTES each, in the order of the ranks. */
gt_status gt_group_connect(gt_group* group, const char* addresses, double timeout_s);

/* How long a call that waits polls the memory that ranks of one host share, before it sleeps: never at 0; below 0, as
 * without this call, some 50 microseconds, unless others need the cores. For ranks that own their cores: a million,
 * say. */
gt_status gt_group_spin(gt_group* group, double spin_us);

/* Where the time of a rank's calls goes, in nanoseconds since gt_group_profile(group, 1), and how often each stage was
 * entered. Time within no call, and of a call before and after it runs the group, is in no stage. */
typedef enum gt_stage {
  GT_STAGE_OUTSIDE = 0, /* nobody runs the group, and nothing is in progress */
  GT_STAGE_FRAMES,      /* whatever is none of the others: frames, bookkeeping */
  GT_STAGE_COPY_OUT,    /* into memory shared with another rank */
  GT_STAGE_COPY_IN,     /* out of it */
  GT_STAGE_READ,        /* out of another process's memory (process_vm_readv) */
  GT_STAGE_SUM,
  GT_STAGE_DELIVER, /* results into this rank's own array */
  GT_STAGE_WAKE,    /* of a rank that sleeps */
  GT_STAGE_POLL,    /* looks that found nothing */
  GT_STAGE_YIELD,   /* the core was offered to others */
  GT_STAGE_SLEEP,
  GT_STAGES
} gt_stage;
typedef struct gt_profile {
  uint32_t bytes; /* sizeof(gt_profile), by the caller */
  uint32_t reserved;
  uint64_t operations, by_callers; /* since the group began; by_callers: ended by a thread that waited */
  uint64_t sent, received, read;   /* bytes through shared memory, and read; since the group began */
  uint64_t ns[GT_STAGES], entered[GT_STAGES];
} gt_profile;

/* Measures from now on (1), or no more (0), at the cost of a look at the clock a stage. */
gt_status gt_group_profile(gt_group* group, int on);
gt_status gt_group_profiled(gt_group* group, gt_profile* profile);

/* Reduces `count` elements over all ranks, in place. After a failure the array holds partly old, partly new numbers,
 * and the group is over: close it, and make another one of the ranks that are left. */
gt_status gt_allreduce(gt_group* group, void* data, size_t count, gt_dtype dtype, gt_op op, double timeout_s);

/* The same without waiting: the array belongs to the group until gt_wait, which also frees the work, returns its
 * result. After GT_TIMED_OUT from a gt_wait shorter than the operation's own timeout the work is still there. */
gt_status gt_allreduce_start(gt_group* group, void* data, size_t count, gt_dtype dtype, gt_op op, double timeout_s,
                             gt_work** work);
gt_status gt_wait(gt_work* work, double timeout_s);

/* What a group has done, and what has become of its reducers. */
typedef struct gt_counts {
  uint32_t bytes;            /* sizeof(gt_counts): set by the caller */
  uint32_t lost_reducers;    /* that it goes on without now */
  uint64_t operations;       /* that are complete here */
  uint64_t reducer_losses;   /* so far */
  uint64_t reducer_returns;  /* so far */
  uint64_t taken_over_bytes; /* of results that the ranks made, or passed on, in the place of reducers */
} gt_counts;

gt_status gt_group_counts(gt_group* group, gt_counts* counts);

/* The oldest loss, takeover or return of a reducer that this was not called for yet, as text: reducer, operation and
 * reason, cut off at `size` with its zero. Empty: there is none. */
gt_status gt_group_event(gt_group* group, char* text, size_t size);

/* Leaves and frees the group, after what other ranks still need of this one. NULL is ignored. */
void gt_group_close(gt_group* group, double timeout_s);

/* The text of this thread's last failure. */
const char* gt_last_error(void);

#if defined(__GNUC__)
#pragma GCC visibility pop
#endif
#ifdef __cplusplus
}
#endif

#endif
