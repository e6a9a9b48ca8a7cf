{{- define "tidegate.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else if contains "tidegate" .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-tidegate" .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Labels by which a component's pods are selected; takes (dict "root" $ "component" NAME). */}}
{{- define "tidegate.selectorLabels" -}}
app.kubernetes.io/name: tidegate
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "tidegate.labels" -}}
{{ include "tidegate.selectorLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* Takes (dict "image" IMAGE "default" TAG). */}}
{{- define "tidegate.image" -}}
{{- if .image.digest -}}
{{- printf "%s@%s" .image.repository .image.digest -}}
{{- else -}}
{{- printf "%s:%s" .image.repository (.image.tag | default .default) -}}
{{- end -}}
{{- end -}}

{{- define "tidegate.podSecurityContext" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "tidegate.securityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities: {drop: [ALL]}
{{- end -}}

{{- define "tidegate.credentialsPrefix" -}}
{{ include "tidegate.fullname" . }}
{{- end -}}

{{/*
Variables by which a user of Redis finds it; takes (dict "root" $ "user" NAME "prefix" VARIABLES).
The password comes before the URL that it is part of. */}}
{{- define "tidegate.redisEnv" -}}
{{- $values := .root.Values -}}
{{- if $values.redis.enabled -}}
- name: REDIS_PASSWORD
  valueFrom:
    secretKeyRef:
      name: {{ include "tidegate.credentialsPrefix" .root }}-{{ .user }}
      key: redis-password
- name: {{ .prefix }}REDIS_URL
  value: {{ ternary "rediss" "redis" (ne $values.redis.tlsSecretName "") }}://{{ .user }}:$(REDIS_PASSWORD)@{{ include "tidegate.fullname" .root }}-redis.{{ .root.Release.Namespace }}.svc:6379/0
{{- else }}
{{- $source := index $values.externalRedis (printf "%sUrl" .user) }}
- name: {{ .prefix }}REDIS_URL
  valueFrom:
    secretKeyRef:
      name: {{ $source.secretName }}
      key: {{ $source.key }}
{{- end }}
{{- if include "tidegate.redisCa" .root }}
- name: {{ .prefix }}REDIS_CA_FILE
  value: /var/run/secrets/tidegate/redis-ca/ca.crt
{{- end }}
{{- end -}}

{{/* The volume source of Redis' CA; empty where the system's certificates do. */}}
{{- define "tidegate.redisCa" -}}
{{- if and .Values.redis.enabled .Values.redis.tlsSecretName -}}
secretName: {{ .Values.redis.tlsSecretName }}
items: [{key: ca.crt, path: ca.crt}]
{{- else if and (not .Values.redis.enabled) .Values.externalRedis.ca.secretName -}}
secretName: {{ .Values.externalRedis.ca.secretName }}
items: [{key: {{ .Values.externalRedis.ca.key }}, path: ca.crt}]
{{- end -}}
{{- end -}}

{{/* What the operator may do where it serves namespaces; control-plane.md's list and no more. */}}
{{- define "tidegate.namespacedRules" -}}
- apiGroups: [tidegate.io]
  resources: [enginepools, tenantpolicies, preemptionpolicies, servicelevels]
  verbs: [get, list, watch]
- apiGroups: [tidegate.io]
  resources: [enginepools/status, tenantpolicies/status, preemptionpolicies/status, servicelevels/status]
  verbs: [patch]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, patch]
- apiGroups: [tidegate.io]
  resources: [enginepools/scale]
  verbs: [patch]
# Who else sets its replicas, only the workload itself tells.
- apiGroups: [apps]
  resources: [deployments, statefulsets]
  verbs: [get]
- apiGroups: [apps]
  resources: [deployments/scale, statefulsets/scale]
  verbs: [patch]
- apiGroups: [autoscaling]
  resources: [horizontalpodautoscalers]
  verbs: [list, create, patch, delete]
- apiGroups: [keda.sh]
  resources: [scaledobjects]
  verbs: [list, create, patch, delete]
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create, patch]
{{- if .Values.monitoring.tenantDashboards.enabled }}
# RBAC can't name what doesn't exist yet: a ValidatingAdmissionPolicy holds it to its own.
- apiGroups: [""]
  resources: [configmaps]
  verbs: [list, create, patch]
{{- end }}
{{- end -}}
